/* Payloads out of a socket into their places, and their checksums: what channel.receive_sums does, without the
   interpreter in between. A reader of many columns else asks for it twice for each, and in an agent with many
   connections waits for it each time.

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
    size_t arrived;
    Sum sum; /* of what has arrived, if that is enough for one */
} Place;

static double now(void)
{
    struct timespec read;
    clock_gettime(CLOCK_MONOTONIC, &read);
    return (double)read.tv_sec + (double)read.tv_nsec * 1e-9;
}

/* Fill a place from where it is. 1 if it is full, 0 at the end of the stream, -1 with errno: with that of a socket
   from which nothing comes, if this takes longer than `until`. */
static int filled(int fd, Place *place, double until)
{
    uint8_t *const payload = place->held.buf;
    const size_t length = (size_t)place->held.len;
    while (place->arrived < length) {
        if (now() > until) {
            errno = EAGAIN;
            return -1;
        }
        const size_t left = length - place->arrived;
        const ssize_t some = recv(fd, payload + place->arrived, left < PIECE ? left : PIECE, 0);
        if (some <= 0)
            return (int)some;
        place->arrived += (size_t)some;
        if (length > SHORT_MAX)
            sum_up_to(&place->sum, payload, place->arrived, length);
    }
    return 1;
}

/* Fill them all. 1, 0 as `filled`, or -1 with an exception: also that of a signal. */
static int all_filled(int fd, Place *places, Py_ssize_t count, double seconds)
{
    const double until = now() + seconds;
    int end = 1, error;
    Place *place = places;
    do {
        PyThreadState *released = PyEval_SaveThread();
        while (end == 1 && place < places + count)
            if ((end = filled(fd, place, until)) == 1)
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
        const size_t length = (size_t)place->held.len;
        uint64_t sum = 0;
        bool is_known = true;
        if (length > SHORT_MAX)
            sum = end_sum(&place->sum, place->held.buf, length);
        else
            is_known = moved_payload(NULL, place->held.buf, length, 0, &sum);
        put_item(&made, i, is_known ? PyLong_FromUnsignedLongLong(sum) : NULL);
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
    Place *places = PyMem_Calloc((size_t)count + 1, sizeof(Place));
    if (places == NULL)
        PyErr_NoMemory();
    else
        for (; held < count; held++) {
            if (PyObject_GetBuffer(PyTuple_GET_ITEM(list, held), &places[held].held, PyBUF_WRITABLE) < 0)
                break;
            begin_sum(&places[held].sum);
        }
    const int fd = PyErr_Occurred() ? -1 : duplicate_of(sock);
    if (fd >= 0) {
        const int end = all_filled(fd, places, count, seconds);
        if (end >= 0)
            made = end ? sums_of(places, count) : Py_NewRef(Py_None);
        close(fd);
    }
    while (held > 0)
        PyBuffer_Release(&places[--held].held);
    PyMem_Free(places);
    Py_DECREF(list);
    return made;
}

int add_receive(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"receive_payloads", receive_payloads, METH_VARARGS,
         "Fill these places from a socket within so many seconds; the checksum of each. None if the stream ends."},
        {NULL, NULL, 0, NULL},
    };
    return PyModule_AddFunctions(module, methods);
}
