/* The fields of a driver's column, of which there may be millions: swdriver_shim/cache/prefix_map.py has the same in
   Python. Numbers that each column has for itself are four bytes here, and not an object of 32 and a reference to it.

   Justified by column.bytes of `make bench NAME=driver`. */

#include "native.h"
#include <structmember.h>

enum { OBJECTS = 10 };

typedef struct {
    PyObject_HEAD
    PyObject *objects[OBJECTS];
    int depth, due, slot, uses;
} Fields;

#define OBJECT(name, at) {name, T_OBJECT_EX, offsetof(Fields, objects) + (at) * sizeof(PyObject *), 0, NULL}
#define NUMBER(name) {#name, T_INT, offsetof(Fields, name), 0, NULL}

static PyMemberDef members[] = {
    OBJECT("key", 0),       OBJECT("map", 1),           OBJECT("mark", 2),    OBJECT("parent", 3), OBJECT("ref_count", 4),
    OBJECT("state", 5),     OBJECT("stored_at", 6),     OBJECT("terms", 7),   OBJECT("used_at", 8),
    OBJECT("tier2_used_at", OBJECTS - 1),               NUMBER(depth),        NUMBER(due),         NUMBER(slot),
    NUMBER(uses),           {NULL, 0, 0, 0, NULL},
};

static int traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (int i = 0; i < OBJECTS; i++)
        Py_VISIT(((Fields *)self)->objects[i]);
    return 0;
}

static int clear(PyObject *self)
{
    for (int i = 0; i < OBJECTS; i++)
        Py_CLEAR(((Fields *)self)->objects[i]);
    return 0;
}

/* That a chain of columns may be long is cared for by the class that is made of this one in Python. */
static void dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

int add_fields(PyObject *module)
{
    static PyType_Slot slots[] = {
        {Py_tp_doc, "The fields of a column."},
        {Py_tp_members, members},
        {Py_tp_traverse, traverse},
        {Py_tp_clear, clear},
        {Py_tp_dealloc, dealloc},
        {0, NULL},
    };
    static PyType_Spec spec = {
        .name = "kvss_agent._native.Fields",
        .basicsize = sizeof(Fields),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
        .slots = slots,
    };
    PyObject *type = PyType_FromSpec(&spec);
    const int failed = type == NULL ? -1 : PyModule_AddObjectRef(module, "Fields", type);
    Py_XDECREF(type);
    return failed;
}
