/* All of an evict or a refill through a mapped arena: what PythonWindow in client/window.py does, without the
   interpreter. Whoever holds the lock may change the memory or shut it; who only reads holds the
   interpreter while looking for a slot, and the memory of that slot while copying.

   Justified by shm.evict.64KiB.native (15 GB/s; 11 in Python), shm.refill_copy.64KiB.native (18; 9) and
   shm.evict_batch.64KiB.native (21; 13). */

#include "native.h"

enum { EXTENTS_MAX = 64 };

typedef struct {
    Py_buffer memory; /* of an mmap, which stays mapped while we hold this */
    uint64_t slots;
} Part;

typedef struct {
    PyObject_HEAD
    PyObject *lock, *leased;
    Py_buffer count;
    bool is_open;
    unsigned long long number;
    uint64_t limit; /* slots below it may be used */
    size_t slot_bytes;
    int parts;
    Part part[EXTENTS_MAX];
} Window;

static PyObject *name_of_acquire, *name_of_release;

static void let_go_of(Part *part, int parts)
{
    while (parts > 0)
        PyBuffer_Release(&part[--parts].memory);
}

static PyObject *shut(PyObject *self, PyObject *nothing)
{
    (void)nothing;
    Window *window = (Window *)self;
    const int parts = window->parts;
    window->parts = 0;
    window->limit = 0;
    let_go_of(window->part, parts);
    if (window->is_open)
        PyBuffer_Release(&window->count);
    window->is_open = false;
    Py_RETURN_NONE;
}

static void free_window(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF(shut(self, NULL));
    Py_XDECREF(((Window *)self)->lock);
    Py_XDECREF(((Window *)self)->leased);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *new_window(PyTypeObject *type, PyObject *arguments, PyObject *named_arguments)
{
    PyObject *lock, *leased, *words;
    unsigned long long number;
    Py_buffer count;
    (void)named_arguments;
    if (!PyArg_ParseTuple(arguments, "OO!OK", &lock, &PyDict_Type, &leased, &words, &number) ||
        PyObject_GetBuffer(words, &count, PyBUF_WRITABLE) < 0)
        return NULL;
    Window *made = NULL;
    if (count.len < 8 || (uintptr_t)count.buf % 8 != 0)
        PyErr_SetString(PyExc_ValueError, "the count is a word of eight bytes");
    else
        made = (Window *)type->tp_alloc(type, 0);
    if (made == NULL) {
        PyBuffer_Release(&count);
        return NULL;
    }
    made->lock = Py_NewRef(lock);
    made->leased = Py_NewRef(leased);
    made->number = number;
    made->count = count;
    made->is_open = true;
    return (PyObject *)made;
}

/* An attribute that is a number. -1 with an exception if it is not. */
static long long number_in(PyObject *object, const char *name)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    const long long number = value == NULL ? -1 : PyLong_AsLongLong(value);
    Py_XDECREF(value);
    if (number < 0 && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "%s is %lld", name, number);
    return number;
}

static PyObject *follow(PyObject *self, PyObject *arena)
{
    Window *window = (Window *)self;
    Part part[EXTENTS_MAX];
    int parts = 0;
    if (!window->is_open)
        Py_RETURN_NONE;
    const long long limit = number_in(arena, "slots"), size = limit < 0 ? -1 : number_in(arena, "slot_bytes");
    PyObject *attribute = size < 0 ? NULL : PyObject_GetAttrString(arena, "extents");
    PyObject *extents = attribute == NULL ? NULL : PySequence_Tuple(attribute);
    Py_XDECREF(attribute);
    if (extents == NULL)
        return NULL;
    const Py_ssize_t count = PyTuple_GET_SIZE(extents);
    if (count > EXTENTS_MAX || size < HEADER)
        PyErr_SetString(PyExc_ValueError, "too many extents, or slots too small");
    else
        for (; parts < count; parts++) {
            PyObject *extent = PyTuple_GET_ITEM(extents, parts), *map = PyObject_GetAttrString(extent, "map");
            const long long slots = map == NULL ? -1 : number_in(extent, "slots");
            const int failed =
                slots < 0 ? -1 : PyObject_GetBuffer(map, &part[parts].memory, PyBUF_WRITABLE);
            Py_XDECREF(map);
            if (failed)
                break;
            part[parts].slots = (uint64_t)slots;
            if (slots > part[parts].memory.len / size) {
                PyErr_SetString(PyExc_ValueError, "an extent is smaller than its slots");
                PyBuffer_Release(&part[parts].memory);
                break;
            }
        }
    Py_DECREF(extents);
    if (PyErr_Occurred()) {
        let_go_of(part, parts);
        return NULL;
    }
    Part before[EXTENTS_MAX];
    const int parts_before = window->parts;
    memcpy(before, window->part, sizeof before);
    memcpy(window->part, part, sizeof part);
    window->parts = parts;
    window->limit = (uint64_t)limit;
    window->slot_bytes = (size_t)size;
    let_go_of(before, parts_before);
    Py_RETURN_NONE;
}

/* Where a slot is, and the part it is in. NULL above the slot limit; NULL with an exception where it cannot be. */
static uint8_t *slot_of(const Window *window, PyObject *given, const Part **part)
{
    int overflow;
    const long long number = PyLong_AsLongLongAndOverflow(given, &overflow);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    if (overflow > 0 || (overflow == 0 && number >= 0 && (uint64_t)number >= window->limit))
        return NULL;
    uint64_t index = (uint64_t)number;
    for (*part = window->part; number >= 0 && *part < window->part + window->parts; ++*part) {
        if (index < (*part)->slots)
            return (uint8_t *)(*part)->memory.buf + index * window->slot_bytes;
        index -= (*part)->slots;
    }
    PyErr_Format(PyExc_IndexError, "slot %R of %llu", given, (unsigned long long)window->limit);
    return NULL;
}

static bool call(PyObject *object, PyObject *method)
{
    PyObject *answer = PyObject_CallMethodNoArgs(object, method);
    Py_XDECREF(answer);
    return answer != NULL;
}

/* One column: slot, key, tag, tokens, payload. False with an exception. */
static bool put_in(Window *window, PyObject *const *column)
{
    const Part *part;
    Column named_column = {.sequence = window->number + 1};
    uint8_t *slot = slot_of(window, column[0], &part);
    if (slot == NULL && PyErr_Occurred())
        return false;
    if (slot != NULL && (!set_names(&named_column, column[1], column[2]) ||
                         !write_slot(slot, (Py_ssize_t)window->slot_bytes, &named_column, column[3], column[4])))
        return false;
    window->number = named_column.sequence;
    return true;
}

/* Under the lock, the number of the last evict; or None where somebody may stand in the way. */
typedef PyObject *UnderLock(Window *window, PyObject *const *given, Py_ssize_t count);

/* Whatever comes of it, those that are in their slots are counted. */
static PyObject *put_under_lock(Window *window, UnderLock *put, PyObject *const *given, Py_ssize_t count)
{
    if (!call(window->lock, name_of_acquire))
        return NULL;
    PyObject *type, *value, *trace, *made = put(window, given, count);
    PyErr_Fetch(&type, &value, &trace);
    if (window->is_open)
        __atomic_store_n((uint64_t *)window->count.buf, window->number, __ATOMIC_RELEASE);
    if (!call(window->lock, name_of_release))
        Py_CLEAR(made);
    if (type != NULL)
        PyErr_Restore(type, value, trace);
    return made;
}

static PyObject *evict_one(Window *window, PyObject *const *column, Py_ssize_t count)
{
    (void)count;
    const bool any = PyDict_GET_SIZE(window->leased) > 0;
    const int leased = any ? PyDict_Contains(window->leased, column[0]) : 0;
    if (leased > 0 || !window->is_open)
        Py_RETURN_NONE;
    return leased == 0 && put_in(window, column) ? PyLong_FromUnsignedLongLong(window->number) : NULL;
}

static PyObject *evict_all(Window *window, PyObject *const *columns, Py_ssize_t count)
{
    if (PyDict_GET_SIZE(window->leased) > 0 || !window->is_open)
        Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyTuple_Check(columns[i]) || PyTuple_GET_SIZE(columns[i]) != 5)
            return PyErr_Format(PyExc_TypeError, "a column is a slot, a key, a tag, tokens and a payload");
        if (!put_in(window, &PyTuple_GET_ITEM(columns[i], 0)))
            return NULL;
    }
    return PyLong_FromUnsignedLongLong(window->number);
}

static PyObject *evict(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 5)
        return PyErr_Format(PyExc_TypeError, "wanted are five arguments: slot, key, tag, tokens and payload");
    if (PyMemoryView_Check(arguments[4])) {
        const Py_buffer *payload = PyMemoryView_GET_BUFFER(arguments[4]);
        prefetch_first(NULL, payload->buf, (size_t)payload->len);
    }
    return put_under_lock((Window *)self, evict_one, arguments, count);
}

static PyObject *evict_batch(PyObject *self, PyObject *given)
{
    PyObject *columns = PySequence_Tuple(given), *made = NULL;
    if (columns != NULL)
        made = put_under_lock(
            (Window *)self, evict_all, &PyTuple_GET_ITEM(columns, 0), PyTuple_GET_SIZE(columns));
    Py_XDECREF(columns);
    return made;
}

static PyObject *refill_one(Window *window, PyObject *wanted, PyObject *into)
{
    if (!PyTuple_Check(wanted) || PyTuple_GET_SIZE(wanted) != 2)
        return PyErr_Format(PyExc_TypeError, "wanted is a slot and a column");
    const Part *part;
    const uint8_t *slot = slot_of(window, PyTuple_GET_ITEM(wanted, 0), &part);
    if (slot == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(misses[ABSENT]);
    Py_buffer held;
    if (PyObject_GetBuffer(part->memory.obj, &held, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *made = read_slot(slot, (Py_ssize_t)window->slot_bytes, PyTuple_GET_ITEM(wanted, 1), into);
    PyBuffer_Release(&held);
    return made;
}

static PyObject *refill(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    Window *window = (Window *)self;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "wanted are two arguments: wanted and into");
    PyObject *wanted = PySequence_Fast(arguments[0], "wanted is a sequence"), *made = NULL;
    PyObject *into = wanted == NULL ? NULL : PySequence_Fast(arguments[1], "into is a sequence");
    if (into == NULL)
        goto done;
    const Py_ssize_t columns = PySequence_Fast_GET_SIZE(wanted);
    if (columns != PySequence_Fast_GET_SIZE(into)) {
        PyErr_SetString(PyExc_ValueError, "there is one place for each column");
        goto done;
    }
    made = PyList_New(columns);
    for (Py_ssize_t i = 0; made != NULL && i < columns; i++) {
        if (!window->is_open) { /* or any more */
            Py_SETREF(made, Py_NewRef(Py_None));
            break;
        }
        /* Others may change the lists while bytes are moved. */
        if (i >= PySequence_Fast_GET_SIZE(wanted) || i >= PySequence_Fast_GET_SIZE(into)) {
            PyErr_SetString(PyExc_RuntimeError, "wanted or into has become shorter");
            Py_CLEAR(made);
            break;
        }
        PyObject *one = Py_NewRef(PySequence_Fast_GET_ITEM(wanted, i));
        PyObject *place = Py_NewRef(PySequence_Fast_GET_ITEM(into, i));
        PyObject *found = refill_one(window, one, place);
        Py_DECREF(one);
        Py_DECREF(place);
        put_item(&made, i, found);
    }
done:
    Py_XDECREF(wanted);
    Py_XDECREF(into);
    return made;
}

static PyMethodDef window_methods[] = {
    {"follow", follow, METH_O, "Use the slot limit and the memory of this arena from now on."},
    {"shut", shut, METH_NOARGS, "Nothing goes through here any more."},
    {"evict", FAST(evict), "Put a column into a slot; its number. None if it is not that simple."},
    {"evict_batch", evict_batch, METH_O, "evict(*column) for each; the number of the last."},
    {"refill", FAST(refill), "Copy columns out of their slots, or say why not. None if it is shut."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef window_members[] = {
    {"number", T_ULONGLONG, offsetof(Window, number), 0, "of the last evict"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot window_slots[] = {
    {Py_tp_new, new_window},
    {Py_tp_dealloc, free_window},
    {Py_tp_methods, window_methods},
    {Py_tp_members, window_members},
    {0, NULL},
};

static PyType_Spec window_type = {
    .name = "kvss_agent._native.Window",
    .basicsize = sizeof(Window),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = window_slots,
};

int add_window(PyObject *module)
{
    Py_XSETREF(name_of_acquire, PyUnicode_InternFromString("acquire"));
    Py_XSETREF(name_of_release, PyUnicode_InternFromString("release"));
    PyObject *type = PyType_FromSpec(&window_type);
    const bool failed = type == NULL || name_of_acquire == NULL || name_of_release == NULL ||
                        PyModule_AddType(module, (PyTypeObject *)type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}
