/* The module that Python imports: its parts put together, and the levels that this machine can run. */

#include "native.h"

static PyObject *names_of_levels(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    PyObject *names = PyTuple_New(levels_found);
    for (int i = 0; names != NULL && i < levels_found; i++) {
        PyObject *name = PyUnicode_FromString(name_of_level(i));
        if (name == NULL)
            Py_CLEAR(names);
        else
            PyTuple_SET_ITEM(names, i, name);
    }
    return names;
}

static PyObject *use(PyObject *self, PyObject *wanted)
{
    (void)self;
    const char *name = PyUnicode_AsUTF8(wanted);
    if (name == NULL)
        return NULL;
    if (use_level(name))
        Py_RETURN_NONE;
    return PyErr_Format(PyExc_ValueError, "this machine has no level %s", name);
}

static PyMethodDef methods[] = {
    {"levels", names_of_levels, METH_NOARGS, "The kinds of code that this machine can run, best first."},
    {"_use", use, METH_O, "Use this level in the whole process. For tests."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    find_levels();
    const bool failed = add_payloads(module) < 0 || add_columns(module) < 0 || add_window(module) < 0 ||
                        add_files(module) < 0 || add_moves(module) < 0 || add_receive(module) < 0 ||
                        add_blocks(module) < 0 || add_fields(module) < 0 || add_prompts(module) < 0;
    return failed ? -1 : PyModule_AddStringConstant(module, "name", "compiled");
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvss_agent._native",
    .m_doc = "The mover in compiled code; kvss_agent/native builds and loads it.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
