/* Whole columns: what seal.py does in `write`, `verify` and `copy_out`, with the interpreter asked once
   instead of thirty times, which is what small columns spend their time on. The layout of the header is
   explained there; it is little-endian everywhere.

   Justified by shm.refill_view.*.native (`verify_column`; also of each tier2.spill), by p2p.refill.here.256KiB
   (`transfer_columns`), and, through window.c, by shm.evict.64KiB.native and shm.refill_copy.64KiB.native. */

#include "native.h"

enum { KEY = 16, TOKENS_MAX = 64, VERSION = 1, OPEN = 1, SEALED = 2 };

PyObject *misses[MISSES];
static PyTypeObject *header_type; /* seal.Header, a tuple of six */

static void put(uint8_t *at, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        at[i] = (uint8_t)(value >> 8 * i);
}

uint64_t get(const uint8_t *at, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)at[i] << 8 * i;
    return value;
}

bool set_names(Column *column, PyObject *key, PyObject *tag)
{
    if (!PyBytes_Check(key) || !PyBytes_Check(tag) || PyBytes_GET_SIZE(key) != KEY || PyBytes_GET_SIZE(tag) != KEY) {
        PyErr_SetString(PyExc_ValueError, "a key has 16 bytes and a tag 16");
        return false;
    }
    column->key_object = key;
    column->tag_object = tag;
    column->key = (const uint8_t *)PyBytes_AS_STRING(key);
    column->tag = (const uint8_t *)PyBytes_AS_STRING(tag);
    return true;
}

/* A seal.Column: key, tag, sequence. False, with an exception, if it is something else. */
bool column_of(PyObject *given, Column *column)
{
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 3) {
        PyErr_SetString(PyExc_TypeError, "a column is a key, a tag and a sequence");
        return false;
    }
    if (!set_names(column, PyTuple_GET_ITEM(given, 0), PyTuple_GET_ITEM(given, 1)))
        return false;
    column->sequence = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(given, 2));
    return column->sequence != (uint64_t)-1 || !PyErr_Occurred();
}

/* The header of a sealed column. */
void make_header(uint8_t header[HEADER], const Column *column, uint64_t tokens, uint64_t length, uint64_t checksum)
{
    memcpy(header, (uint8_t[AT_TOKENS]){'T', 'I', 'D', 'E', VERSION, SEALED}, AT_TOKENS);
    put(header + AT_TOKENS, tokens, 2);
    put(header + AT_SEQUENCE, column->sequence, 8);
    memcpy(header + AT_KEY, column->key, KEY);
    memcpy(header + AT_TAG, column->tag, KEY);
    put(header + AT_CHECKSUM, checksum, 8);
    put(header + AT_LENGTH, length, 4);
    put(header + CHECKED, check_of_header(header), 4);
}

/* Seal a payload into a slot. False with an exception, and then the slot is as it was. */
bool write_slot(
    uint8_t *slot, Py_ssize_t room, const Column *column, PyObject *given_tokens, PyObject *given_payload)
{
    Py_buffer payload;
    const long tokens = PyLong_AsLong(given_tokens);
    if ((tokens == -1 && PyErr_Occurred()) || PyObject_GetBuffer(given_payload, &payload, PyBUF_SIMPLE) < 0)
        return false;
    bool made = false;
    const uint64_t length = (uint64_t)payload.len;
    if (tokens < 1 || tokens > TOKENS_MAX)
        PyErr_Format(PyExc_ValueError, "a column holds 1 to %d tokens, not %ld", TOKENS_MAX, tokens);
    else if (length < 1 || length > PAYLOAD_MAX)
        PyErr_Format(PyExc_ValueError, "a payload has 1 to 1073741824 bytes, not %zd", payload.len);
    else if (room < HEADER + payload.len)
        PyErr_Format(PyExc_ValueError, "a payload of %zd bytes does not fit a slot of %zd", payload.len, room);
    else {
        uint8_t sealed[HEADER] = {'T', 'I', 'D', 'E', VERSION, OPEN};
        uint64_t sum;
        put(sealed + AT_SEQUENCE, column->sequence, 8);
        memcpy(slot, sealed, AT_KEY); /* open, by this evict */
        __atomic_thread_fence(__ATOMIC_RELEASE);
        made = moved_payload(slot + HEADER, payload.buf, length, STREAM_IN_FROM, &sum);
        if (made) {
            make_header(sealed, column, (uint64_t)tokens, length, sum);
            __atomic_thread_fence(__ATOMIC_RELEASE);
            memcpy(slot, sealed, HEADER);
        }
    }
    PyBuffer_Release(&payload);
    return made;
}

/* What 64 bytes say, and whether it is the column that is expected. */
enum miss identified(const uint8_t *header, const Column *column)
{
    static const uint8_t nothing[HEADER];
    if (memcmp(header, "TIDE", 4) != 0)
        return memcmp(header, nothing, HEADER) == 0 ? ABSENT : CORRUPT;
    if (header[4] == VERSION && header[5] == OPEN)
        return TORN;
    if (header[4] != VERSION || header[5] != SEALED || get(header + CHECKED, 4) != check_of_header(header))
        return CORRUPT;
    const uint64_t tokens = get(header + AT_TOKENS, 2), length = get(header + AT_LENGTH, 4);
    if (tokens < 1 || tokens > TOKENS_MAX || length < 1 || length > PAYLOAD_MAX)
        return CORRUPT;
    if (memcmp(header + AT_TAG, column->tag, KEY) != 0)
        return FOREIGN;
    if (memcmp(header + AT_KEY, column->key, KEY) != 0 || get(header + AT_SEQUENCE, 8) != column->sequence)
        return STALE;
    return NO_MISS;
}

PyObject *header_of(const uint8_t *header, const Column *column)
{
    PyObject *made = header_type->tp_alloc(header_type, 6);
    if (made == NULL)
        return NULL;
    PyTuple_SET_ITEM(made, 0, PyLong_FromUnsignedLongLong(get(header + AT_TOKENS, 2)));
    PyTuple_SET_ITEM(made, 1, PyLong_FromUnsignedLongLong(column->sequence));
    PyTuple_SET_ITEM(made, 2, Py_NewRef(column->key_object));
    PyTuple_SET_ITEM(made, 3, Py_NewRef(column->tag_object));
    PyTuple_SET_ITEM(made, 4, PyLong_FromUnsignedLongLong(get(header + AT_CHECKSUM, 8)));
    PyTuple_SET_ITEM(made, 5, PyLong_FromUnsignedLongLong(get(header + AT_LENGTH, 4)));
    for (int i = 0; i < 6; i++)
        if (PyTuple_GET_ITEM(made, i) == NULL) {
            Py_DECREF(made);
            return NULL;
        }
    return made;
}

/* Look into a slot, and copy to `given_into` if there is one. */
PyObject *read_slot(const uint8_t *slot, Py_ssize_t room, PyObject *given_column, PyObject *given_into)
{
    Column column;
    Py_buffer into = {.buf = NULL, .obj = NULL};
    if (header_type == NULL)
        return PyErr_Format(PyExc_RuntimeError, "bind() has not been called");
    if (room < HEADER)
        return PyErr_Format(PyExc_ValueError, "a slot has 64 bytes or more");
    prefetch_first(NULL, slot, (size_t)room);
    if (given_into != NULL && PyObject_GetBuffer(given_into, &into, PyBUF_WRITABLE) < 0)
        return NULL;
    prefetch_first(NULL, into.buf, (size_t)into.len < STRIPE ? (size_t)into.len : STRIPE);
    if (!column_of(given_column, &column)) {
        PyBuffer_Release(&into);
        return NULL;
    }
    PyObject *made = NULL;
    uint8_t header[HEADER];
    uint64_t sum;
    memcpy(header, slot, HEADER);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    enum miss miss = identified(header, &column);
    const uint64_t length = get(header + AT_LENGTH, 4);
    if (miss == NO_MISS && length > (uint64_t)room - HEADER)
        miss = CORRUPT;
    if (miss == NO_MISS && into.obj != NULL && length > (uint64_t)into.len) {
        PyErr_Format(PyExc_ValueError, "a payload of %llu bytes does not fit %zd", (unsigned long long)length, into.len);
        goto done;
    }
    if (miss == NO_MISS) {
        if (!moved_payload(into.buf, slot + HEADER, length, STREAM_OUT_FROM, &sum))
            goto done;
        if (sum != get(header + AT_CHECKSUM, 8)) /* overwritten meanwhile, or damaged? */
            miss = memcmp(header, slot, HEADER) == 0 ? CORRUPT : TORN;
    }
    made = miss == NO_MISS ? header_of(header, &column) : Py_NewRef(misses[miss]);
done:
    PyBuffer_Release(&into);
    return made;
}

static PyObject *verify_column(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    Py_buffer slot;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "wanted are two arguments: slot and column");
    if (PyObject_GetBuffer(arguments[0], &slot, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *made = read_slot(slot.buf, slot.len, arguments[1], NULL);
    PyBuffer_Release(&slot);
    return made;
}

/* A sealed column on its way from a slot to another one, which is open for it. */
typedef struct {
    Py_buffer slot, into;
    Column column; /* sequence: as which evict it is sealed there */
    uint8_t header[HEADER];
    size_t length;
    enum miss miss;
} Transfer;

static bool is_open_for(const uint8_t *slot, const Column *column)
{
    uint8_t mark[AT_KEY] = {'T', 'I', 'D', 'E', VERSION, OPEN};
    put(mark + AT_SEQUENCE, column->sequence, 8);
    return memcmp(slot, mark, AT_KEY) == 0 && memcmp(slot + AT_TAG, column->tag, KEY) == 0;
}

/* Seal what has come into a slot with this header, unless it is something else, or the slot was purged meanwhile. */
enum miss seal_arrived(uint8_t *slot, const Column *column, const uint8_t *said, uint64_t sum)
{
    uint8_t header[HEADER];
    if (sum != get(said + AT_CHECKSUM, 8))
        return TORN; /* overwritten on the way, or damaged */
    if (!is_open_for(slot, column))
        return ABSENT;
    make_header(header, column, get(said + AT_TOKENS, 2), get(said + AT_LENGTH, 4), sum);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memcpy(slot, header, HEADER);
    return NO_MISS;
}

/* Look whether the slot holds the column, whichever evict wrote it. */
static void identify_source(Transfer *one)
{
    Column expected = one->column;
    memcpy(one->header, one->slot.buf, HEADER);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    expected.sequence = get(one->header + AT_SEQUENCE, 8);
    one->miss = identified(one->header, &expected);
    one->length = get(one->header + AT_LENGTH, 4);
    if (one->miss == NO_MISS && one->length > (size_t)one->into.len - HEADER)
        one->miss = CORRUPT;
}

/* Seal what has arrived, unless it is not what was sealed before, or the slot was purged meanwhile. */
static void seal_transferred(Transfer *one, uint64_t sum)
{
    if (sum != get(one->header + AT_CHECKSUM, 8)) {
        one->miss = memcmp(one->header, one->slot.buf, HEADER) == 0 ? CORRUPT : TORN;
        return;
    }
    put(one->header + AT_SEQUENCE, one->column.sequence, 8);
    put(one->header + CHECKED, check_of_header(one->header), 4);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    if (is_open_for(one->into.buf, &one->column))
        memcpy(one->into.buf, one->header, HEADER);
    else
        one->miss = ABSENT;
}

/* A seal.Transfer: slot, into, column. False, with an exception, if it is something else. */
static bool transfer_of(PyObject *given, Transfer *one)
{
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 3) {
        PyErr_SetString(PyExc_TypeError, "a transfer is a slot, a slot that it goes into, and a column");
        return false;
    }
    if (PyObject_GetBuffer(PyTuple_GET_ITEM(given, 0), &one->slot, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(PyTuple_GET_ITEM(given, 1), &one->into, PyBUF_WRITABLE) < 0 ||
        !column_of(PyTuple_GET_ITEM(given, 2), &one->column))
        return false;
    const uintptr_t from = (uintptr_t)one->slot.buf, to = (uintptr_t)one->into.buf;
    const size_t room = (size_t)one->slot.len;
    if (one->slot.len < HEADER || one->into.len != one->slot.len) {
        PyErr_Format(PyExc_ValueError, "slots of %zd and %zd bytes", one->slot.len, one->into.len);
        return false;
    }
    if (to < from + room && from < to + room) {
        PyErr_SetString(PyExc_ValueError, "a slot is not transferred to itself");
        return false;
    }
    return true;
}

/* All of them, for which the interpreter's lock is released once. A short one needs it for its checksum. */
static bool transfer_all(Transfer *all, Py_ssize_t count)
{
    PyThreadState *released = PyEval_SaveThread();
    for (Transfer *one = all; one < all + count; one++) {
        identify_source(one);
        if (one->miss == NO_MISS && one->length > SHORT_MAX) {
            uint8_t *into = (uint8_t *)one->into.buf + HEADER;
            const bool streams = one->length >= STREAM_IN_FROM && (uintptr_t)into % STRIPE == 0;
            const uint8_t *from = (const uint8_t *)one->slot.buf + HEADER;
            seal_transferred(one, copied(into, from, one->length, streams ? STREAMED : PLAIN));
        }
    }
    PyEval_RestoreThread(released);
    for (Transfer *one = all; one < all + count; one++)
        if (one->miss == NO_MISS && one->length <= SHORT_MAX) {
            uint64_t sum;
            if (!moved_payload(
                    (uint8_t *)one->into.buf + HEADER, (const uint8_t *)one->slot.buf + HEADER, one->length,
                    STREAM_IN_FROM, &sum))
                return false;
            seal_transferred(one, sum);
        }
    return true;
}

static PyObject *transfer_columns(PyObject *self, PyObject *given)
{
    (void)self;
    if (header_type == NULL)
        return PyErr_Format(PyExc_RuntimeError, "bind() has not been called");
    PyObject *items = PySequence_Tuple(given); /* nobody else changes this one */
    if (items == NULL)
        return NULL;
    const Py_ssize_t count = PyTuple_GET_SIZE(items);
    Transfer *all = PyMem_Calloc((size_t)count, sizeof *all);
    PyObject *made = NULL;
    if (all == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (!transfer_of(PyTuple_GET_ITEM(items, i), all + i))
            goto done;
    if (!transfer_all(all, count))
        goto done;
    made = PyList_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        const Transfer *one = all + i;
        PyObject *found =
            one->miss == NO_MISS ? header_of(one->header, &one->column) : Py_NewRef(misses[one->miss]);
        put_item(&made, i, found);
    }
done:
    for (Py_ssize_t i = 0; all != NULL && i < count; i++) {
        PyBuffer_Release(&all[i].slot);
        PyBuffer_Release(&all[i].into);
    }
    PyMem_Free(all);
    Py_DECREF(items);
    return made;
}

static PyObject *bind(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 1 + MISSES || !PyType_Check(arguments[0]) ||
        !PyType_IsSubtype((PyTypeObject *)arguments[0], &PyTuple_Type))
        return PyErr_Format(PyExc_TypeError, "wanted are the type of a header and five misses");
    Py_XSETREF(header_type, (PyTypeObject *)Py_NewRef(arguments[0]));
    for (int i = 0; i < MISSES; i++)
        Py_XSETREF(misses[i], Py_NewRef(arguments[1 + i]));
    Py_RETURN_NONE;
}

int add_columns(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"verify_column", FAST(verify_column), "seal.verify(slot, column)"},
        {"transfer_columns", transfer_columns, METH_O, "seal.transfer for each of these (slot, into, column)"},
        {"_bind", FAST(bind), "What is answered with: seal.Header, and ABSENT, TORN, STALE, FOREIGN, CORRUPT."},
        {NULL, NULL, 0, NULL},
    };
    return PyModule_AddFunctions(module, methods);
}
