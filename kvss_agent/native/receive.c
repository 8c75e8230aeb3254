/* Payloads out of a socket into their places, and their checksums: what channel.receive_sums does, without the
   interpreter in between. A reader of many columns else asks for it twice for each, and in an agent with many
   connections waits for it each time. Columns that are borrowed come into slots that are open for them, and are
   sealed there: each as soon as it is whole, while the next one is on its way.

   Justified by tcp.refill.256KiB.native and p2p.refill.tcp.256KiB. */

#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 256 << 10 }; /* is summed up while it is in the cache and the next one is on its way */

typedef struct {
    Py_buffer held;
    uint8_t *payload; /* where it belongs; NULL: nowhere, and it is thrown away */
    size_t length, arrived;
    Sum sum; /* of what has arrived, if that is enough for one */
    /* Of columns only: */
    const uint8_t *said; /* the header that has come before */
    Column column;       /* what the slot is open for */
    enum miss miss;      /* as far as known */
} Place;

static double now(void)
{
    struct timespec read;
    clock_gettime(CLOCK_MONOTONIC, &read);
    return (double)read.tv_sec + (double)read.tv_nsec * 1e-9;
}

/* Fill a place from where it is, and seal a column. 1 if it is full, 0 at the end of the stream, -1 with errno: with
   that of a socket from which nothing comes, if this takes longer than `until`. */
static int filled(int fd, Place *place, uint8_t *waste, double until)
{
    const size_t length = place->length;
    while (place->arrived < length) {
        if (now() > until) {
            errno = EAGAIN;
            return -1;
        }
        const size_t left = length - place->arrived;
        uint8_t *const into = place->payload != NULL ? place->payload + place->arrived : waste;
        const ssize_t some = recv(fd, into, left < PIECE ? left : PIECE, 0);
        if (some <= 0)
            return (int)some;
        place->arrived += (size_t)some;
        if (place->payload != NULL && length > SHORT_MAX)
            sum_up_to(&place->sum, place->payload, place->arrived, length);
    }
    if (place->said != NULL && place->payload != NULL && length > SHORT_MAX)
        place->miss = seal_arrived(
            place->held.buf, &place->column, place->said, end_sum(&place->sum, place->payload, length));
    return 1;
}

/* Fill them all. 1, 0 as `filled`, or -1 with an exception: also that of a signal. */
static int all_filled(int fd, Place *places, Py_ssize_t count, uint8_t *waste, double seconds)
{
    const double until = now() + seconds;
    int end = 1, error;
    Place *place = places;
    do {
        PyThreadState *released = PyEval_SaveThread();
        while (end == 1 && place < places + count)
            if ((end = filled(fd, place, waste, until)) == 1)
                place++;
        error = errno;
        PyEval_RestoreThread(released);
    } while (end < 0 && error == EINTR && PyErr_CheckSignals() == 0 && (end = 1));
    if (end < 0 && !PyErr_Occurred()) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    return end;
}

static PyObject *sums_of(Place *places, Py_ssize_t count)
{
    PyObject *made = PyList_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        Place *place = &places[i];
        uint64_t sum = 0;
        bool is_known = true;
        if (place->length > SHORT_MAX)
            sum = end_sum(&place->sum, place->payload, place->length);
        else
            is_known = moved_payload(NULL, place->payload, place->length, 0, &sum);
        put_item(&made, i, is_known ? PyLong_FromUnsignedLongLong(sum) : NULL);
    }
    return made;
}

/* What has become of each column. The few bytes that only the interpreter can sum up are sealed here. */
static PyObject *found_of(Place *places, Py_ssize_t count)
{
    PyObject *made = PyList_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        Place *place = &places[i];
        uint64_t sum;
        bool is_known = true;
        if (place->payload != NULL && place->length <= SHORT_MAX) {
            is_known = moved_payload(NULL, place->payload, place->length, 0, &sum);
            if (is_known)
                place->miss = seal_arrived(place->held.buf, &place->column, place->said, sum);
        }
        PyObject *found = !is_known               ? NULL
                          : place->miss == NO_MISS ? header_of(place->said, &place->column)
                                                   : Py_NewRef(misses[place->miss]);
        put_item(&made, i, found);
    }
    return made;
}

/* A descriptor of our own for a socket: another thread may close it, and a new one get its number. It is asked
   for its number here, where nobody else runs meanwhile; and no child process gets ours. -1 with an exception. */
static int duplicate_of(PyObject *sock)
{
    PyObject *number = PyObject_CallMethod(sock, "fileno", NULL);
    if (number == NULL)
        return -1;
    const long fd = PyLong_AsLong(number); /* -1 if it is closed */
    Py_DECREF(number);
    if (fd == -1 && PyErr_Occurred())
        return -1;
    const int made = fcntl((int)fd, F_DUPFD_CLOEXEC, 0);
    if (made < 0)
        PyErr_SetFromErrno(PyExc_OSError);
    return made;
}

/* A place for a payload. False with an exception. */
static bool place_of(Place *place, PyObject *given)
{
    if (PyObject_GetBuffer(given, &place->held, PyBUF_WRITABLE) < 0)
        return false;
    place->payload = place->held.buf;
    place->length = (size_t)place->held.len;
    begin_sum(&place->sum);
    return true;
}

/* The slot of a column whose header has come, given as (slot, seal.Column). Only what is the column, and fits its
   slot, gets there. False with an exception. */
static bool slot_of(Place *place, PyObject *given, PyObject *said, uint64_t most)
{
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 2 || !PyBytes_Check(said) || PyBytes_GET_SIZE(said) != HEADER) {
        PyErr_SetString(PyExc_TypeError, "wanted are a header, and a slot with its column");
        return false;
    }
    if (!column_of(PyTuple_GET_ITEM(given, 1), &place->column) ||
        PyObject_GetBuffer(PyTuple_GET_ITEM(given, 0), &place->held, PyBUF_WRITABLE) < 0)
        return false;
    place->said = (const uint8_t *)PyBytes_AS_STRING(said);
    Column expected = place->column;
    expected.sequence = get(place->said + AT_SEQUENCE, 8); /* whichever evict wrote it */
    place->miss = identified(place->said, &expected);
    if (place->miss != NO_MISS && place->miss != FOREIGN && place->miss != STALE)
        return true; /* without a payload */
    const uint64_t length = get(place->said + AT_LENGTH, 4);
    if (length > most) {
        PyErr_SetString(PyExc_ValueError, "a payload is larger than a slot");
        return false;
    }
    place->length = (size_t)length;
    if (place->miss == NO_MISS && HEADER + (Py_ssize_t)length > place->held.len)
        place->miss = CORRUPT;
    if (place->miss == NO_MISS)
        place->payload = (uint8_t *)place->held.buf + HEADER;
    begin_sum(&place->sum);
    return true;
}

static void let_go(Place *places, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; places != NULL && i < count; i++)
        PyBuffer_Release(&places[i].held);
    PyMem_Free(places);
}

static Place *made_places(Py_ssize_t count)
{
    Place *places = PyMem_Calloc((size_t)count + 1, sizeof(Place));
    if (places == NULL)
        PyErr_NoMemory();
    return places;
}

/* Fill these places from the socket; what `answer` makes of them, None at the end of the stream. */
static PyObject *received(
    PyObject *sock, Place *places, Py_ssize_t count, double seconds, PyObject *(*answer)(Place *, Py_ssize_t))
{
    PyObject *made = NULL;
    uint8_t *waste = NULL;
    for (Py_ssize_t i = 0; waste == NULL && i < count; i++)
        if (places[i].payload == NULL && places[i].length > 0 && (waste = PyMem_Malloc(PIECE)) == NULL)
            return PyErr_NoMemory();
    const int fd = duplicate_of(sock);
    if (fd >= 0) {
        const int end = all_filled(fd, places, count, waste, seconds);
        if (end >= 0)
            made = end ? answer(places, count) : Py_NewRef(Py_None);
        close(fd);
    }
    PyMem_Free(waste);
    return made;
}

static PyObject *receive_payloads(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *sock, *given, *made = NULL;
    double seconds;
    if (!PyArg_ParseTuple(arguments, "OOd", &sock, &given, &seconds))
        return NULL;
    PyObject *list = PySequence_Tuple(given);
    if (list == NULL)
        return NULL;
    const Py_ssize_t count = PyTuple_GET_SIZE(list);
    Py_ssize_t held = 0;
    Place *places = made_places(count);
    while (places != NULL && held < count && place_of(&places[held], PyTuple_GET_ITEM(list, held)))
        held++;
    if (!PyErr_Occurred())
        made = received(sock, places, count, seconds, sums_of);
    let_go(places, held);
    Py_DECREF(list);
    return made;
}

static PyObject *receive_columns(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *sock, *given, *headers, *made = NULL;
    unsigned long long most;
    double seconds;
    if (misses[0] == NULL)
        return PyErr_Format(PyExc_RuntimeError, "bind() has not been called");
    if (!PyArg_ParseTuple(arguments, "OO!OKd", &sock, &PyTuple_Type, &headers, &given, &most, &seconds))
        return NULL;
    PyObject *list = PySequence_Tuple(given);
    if (list == NULL)
        return NULL;
    const Py_ssize_t count = PyTuple_GET_SIZE(list);
    Py_ssize_t held = 0;
    Place *places = made_places(count);
    if (places != NULL && PyTuple_GET_SIZE(headers) != count)
        PyErr_SetString(PyExc_ValueError, "there is one header for each slot");
    else
        while (places != NULL && held < count) {
            Place *place = &places[held];
            const bool is_made = slot_of(place, PyTuple_GET_ITEM(list, held), PyTuple_GET_ITEM(headers, held), most);
            held += place->held.obj != NULL;
            if (!is_made)
                break;
        }
    if (!PyErr_Occurred())
        made = received(sock, places, count, seconds, found_of);
    let_go(places, held);
    Py_DECREF(list);
    return made;
}

int add_receive(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"receive_payloads", receive_payloads, METH_VARARGS,
         "Fill these places from a socket within so many seconds; the checksum of each. None if the stream ends."},
        {"receive_columns", receive_columns, METH_VARARGS,
         "Receive columns with these headers into (slot, column), and seal each; its header or miss. None if the "
         "stream ends."},
        {NULL, NULL, 0, NULL},
    };
    return PyModule_AddFunctions(module, methods);
}
