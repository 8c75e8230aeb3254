/* Moving one payload: which store to use, and when to release the interpreter's lock.

   Justified by shm.evict.*.native (copies) and by unix.evict.*.native and tcp.evict.*.native, whose sender
   makes the checksum before the first byte. */

#include "native.h"

/* From how many bytes on a copy goes around the cache ("streamed"). A plain store first reads the line
   that it overwrites; a streamed one does not, but whoever reads next has to fetch it from memory.
   Measured on a Zen 5 (1 MiB of L2 a core, 32 MiB of L3) over far more memory than its caches hold:

   Into a slot, streaming is as fast from 16 KiB on and faster beyond; of a payload of 64 KiB to 16 MiB
   it makes 1.1 to 1.4 times the speed of memcpy if the source is cold, up to 1.8 times if it is warm.

   Out of a slot, from 64 KiB on, it makes 1.3 to 1.4 times the speed of plain stores if `into` is cold,
   and the same if it is warm. A core that reads all of it right after loses that again: of 64 KiB, both
   steps together take 1.1 times as long, or 1.4 times if `into` was warm; from 1 MiB on, cold, they
   gain. But columns are read next by a device, and the cache belongs to those who compute. */
const size_t STREAM_IN_FROM = 16 << 10, STREAM_OUT_FROM = 64 << 10;

/* Below this, releasing the interpreter's lock and waiting to have it back costs more than the copy. */
static const size_t RELEASE_FROM = 16 << 10;

/* Move the payload, or only sum it up: `into` may be NULL. False with an exception. */
bool moved_payload(uint8_t *into, const uint8_t *from, size_t length, size_t stream_from, uint64_t *sum)
{
    if (length <= SHORT_MAX) {
        if (into != NULL)
            from = memcpy(into, from, length);
        PyObject *xxhash = PyImport_ImportModule("xxhash");
        if (xxhash == NULL)
            return false;
        PyObject *made = PyObject_CallMethod(xxhash, "xxh3_64_intdigest", "y#", from, (Py_ssize_t)length);
        Py_DECREF(xxhash);
        if (made == NULL)
            return false;
        *sum = PyLong_AsUnsignedLongLong(made);
        Py_DECREF(made);
        return true;
    }
    enum store how = NOT_AT_ALL;
    if (into != NULL)
        how = length >= stream_from && (uintptr_t)into % STRIPE == 0 ? STREAMED : PLAIN;
    PyThreadState *released = length >= RELEASE_FROM ? PyEval_SaveThread() : NULL;
    *sum = copied(into, from, length, how);
    if (released != NULL)
        PyEval_RestoreThread(released);
    return true;
}

/* Move `source` to `into`, or only sum it up where `into` is NULL. Both are held meanwhile, so that nobody
   can unmap them. */
static PyObject *move(PyObject *into, PyObject *source, size_t stream_from)
{
    Py_buffer to = {.buf = NULL, .obj = NULL}, from;
    if (PyObject_GetBuffer(source, &from, PyBUF_SIMPLE) < 0)
        return NULL;
    if (into != NULL && PyObject_GetBuffer(into, &to, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&from);
        return NULL;
    }
    const size_t length = (size_t)from.len;
    const uintptr_t there = (uintptr_t)to.buf, here = (uintptr_t)from.buf;
    uint64_t sum;
    PyObject *made = NULL;
    if (into != NULL && to.len != from.len)
        PyErr_Format(PyExc_ValueError, "into has %zd bytes and source %zd", to.len, from.len);
    else if (into != NULL && length > 0 && there < here + length && here < there + length)
        PyErr_SetString(PyExc_ValueError, "into and source overlap");
    else if (moved_payload(to.buf, from.buf, length, stream_from, &sum))
        made = PyLong_FromUnsignedLongLong(sum);
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    return made;
}

static PyObject *move_pair(PyObject *const *arguments, Py_ssize_t count, size_t stream_from)
{
    if (count == 2)
        return move(arguments[0], arguments[1], stream_from);
    PyErr_SetString(PyExc_TypeError, "wanted are two arguments: into and source");
    return NULL;
}

static PyObject *copy_in(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    return move_pair(arguments, count, STREAM_IN_FROM);
}

static PyObject *copy_out(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    return move_pair(arguments, count, STREAM_OUT_FROM);
}

static PyObject *checksum(PyObject *self, PyObject *source)
{
    (void)self;
    return move(NULL, source, 0);
}

int add_payloads(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"copy_in", FAST(copy_in), "Copy a payload into its slot. Returns its checksum."},
        {"copy_out", FAST(copy_out), "Copy a payload out of its slot. Returns the checksum of the copy."},
        {"checksum", checksum, METH_O, "The checksum of these bytes."},
        {NULL, NULL, 0, NULL},
    };
    return PyModule_AddFunctions(module, methods);
}
