/* Whole columns between slots and files: for each the file of files.c and the checks of columns.c, one column
   after the other, without the interpreter in between.

   Justified by tier2.spill.64KiB and tier2.recall.64KiB, of which Python took as much as the system calls. */

#include "native.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

typedef struct {
    File file;                            /* with the slot's memory as the first that is held */
    PyObject *given_final, *final;        /* of a spill: the path to come, as it was given, and in bytes */
    PyObject *given_victim, *victim;      /* the same of the file that it displaces, or NULL */
    Column evicted, filed;                /* what the slot's header says, and what the file's says */
    uint8_t sealed[HEADER], head[HEADER]; /* the slot's header as it has to be, and the file's */
    enum miss miss;
    PyObject *failed_at; /* the path that the kernel refused, if it did */
} Move;

static const uint8_t zeros[PAGE];

static uint64_t length_in(const uint8_t *header)
{
    return get(header + AT_LENGTH, 4);
}

/* Of a file, and of the slot that it fits. */
static size_t file_bytes_of(const uint8_t *header)
{
    return (HEADER + length_in(header) + PAGE - 1) / PAGE * PAGE;
}

static uint8_t *slot_of(const Move *move)
{
    return move->file.held[0].buf;
}

static bool fits_slot(const Move *move, const uint8_t *header)
{
    return HEADER + length_in(header) <= (uint64_t)move->file.held[0].len;
}

/* Whether the slot's payload is what this header says. The few bytes that only the interpreter can sum up
   (payloads.c) take it back for a moment; if it fails there is an exception. */
static bool has_payload(const Move *move, const uint8_t *header, PyThreadState **released)
{
    const uint64_t length = length_in(header);
    uint64_t sum = 0;
    bool is_known = true;
    if (length > SHORT_MAX)
        sum = copied(NULL, slot_of(move) + HEADER, length, NOT_AT_ALL);
    else {
        PyEval_RestoreThread(*released);
        is_known = moved_payload(NULL, slot_of(move) + HEADER, length, 0, &sum);
        *released = PyEval_SaveThread();
    }
    return is_known && sum == get(header + AT_CHECKSUM, 8);
}

/* Why the slot does not hold what was sealed there, in the order of seal.verify. */
static enum miss why_changed(const Move *move, PyThreadState **released)
{
    uint8_t header[HEADER];
    memcpy(header, slot_of(move), HEADER);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    const enum miss miss = identified(header, &move->evicted);
    if (miss != NO_MISS)
        return miss;
    if (!fits_slot(move, header))
        return CORRUPT;
    if (!has_payload(move, header, released))
        return memcmp(header, slot_of(move), HEADER) == 0 ? CORRUPT : TORN;
    return memcmp(header, move->sealed, HEADER) == 0 ? NO_MISS : TORN;
}

static void store_one(Move *move, int flags, bool locked, const Py_buffer *bounce, PyThreadState **released)
{
    File *file = &move->file;
    if (move->victim != NULL && took_over(file, PyBytes_AS_STRING(move->victim), flags, locked)) {
        flags = of_named(flags);
        fill_one(file, bounce);
    } else if (file->failed)
        move->failed_at = move->given_victim;
    else
        stage_one(file, flags, locked, bounce);
    if (file->failed)
        return;
    const char *unfinished = PyBytes_AS_STRING(file->path);
    move->miss = why_changed(move, released);
    move->failed_at = move->given_final;
    if (move->miss == NO_MISS)
        file->failed = publish_one(file->fd, unfinished, PyBytes_AS_STRING(move->final), flags, locked);
    else
        discard_one(file);
}

/* Why what was received is not the file of this column, in the order of column_file.identified. */
static enum miss why_refused(const Move *move, PyThreadState **released)
{
    const size_t received = move->file.done;
    if (received < HEADER)
        return TORN;
    Column filed = move->filed;
    filed.sequence = get(move->head + AT_SEQUENCE, 8); /* whatever was noted */
    const enum miss miss = identified(move->head, &filed);
    if (miss != NO_MISS)
        return miss == ABSENT ? TORN : miss; /* zeros: the file's blocks never came */
    if (!fits_slot(move, move->head))
        return CORRUPT;
    const size_t expected = file_bytes_of(move->head);
    if (received != expected)
        return received < expected ? TORN : CORRUPT;
    return has_payload(move, move->head, released) ? NO_MISS : CORRUPT;
}

static void load_one(Move *move, int flags, bool locked, const Py_buffer *bounce, PyThreadState **released)
{
    (void)locked;
    fetch_one(&move->file, flags, bounce);
    if (move->file.failed)
        return;
    move->miss = why_refused(move, released);
    move->filed.sequence = get(move->head + AT_SEQUENCE, 8);
}

static bool parsed(PyObject *given, const char *format, ...)
{
    va_list places;
    va_start(places, format);
    const bool made = PyTuple_Check(given) ? PyArg_VaParse(given, format, places) : false;
    va_end(places);
    if (!made && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "each column is a tuple");
    return made;
}

static bool hold_slot(Move *move, PyObject *path, PyObject *slot, int how)
{
    File *file = &move->file;
    if (!hold_path(file, path) || !hold_buffer(file, slot, how))
        return false;
    move->failed_at = file->given_path;
    if (file->held[0].len >= HEADER)
        return true;
    PyErr_SetString(PyExc_ValueError, "a slot has 64 bytes or more");
    return false;
}

/* (unfinished path, path, slot, seal.Column of the slot, seal.Header of it, seal.Column of the file, path of the
   victim or None) */
static bool hold_spill(Move *move, PyObject *given)
{
    PyObject *path, *slot, *evicted, *header, *filed, *key, *tag;
    unsigned long long tokens, sequence, checksum, length;
    if (!parsed(
            given, "OOOOOOO", &path, &move->given_final, &slot, &evicted, &header, &filed, &move->given_victim) ||
        !hold_slot(move, path, slot, PyBUF_SIMPLE) || !PyUnicode_FSConverter(move->given_final, &move->final) ||
        (move->given_victim != Py_None && !PyUnicode_FSConverter(move->given_victim, &move->victim)) ||
        !column_of(evicted, &move->evicted) || !column_of(filed, &move->filed) ||
        !parsed(header, "KKOOKK", &tokens, &sequence, &key, &tag, &checksum, &length))
        return false;
    make_header(move->sealed, &move->evicted, tokens, length, checksum);
    make_header(move->head, &move->filed, tokens, length, checksum);
    if (length > PAYLOAD_MAX || !fits_slot(move, move->head)) {
        PyErr_Format(PyExc_ValueError, "a payload of %llu bytes does not fit its slot", length);
        return false;
    }
    const size_t end = HEADER + (size_t)length;
    add_part(&move->file, move->head, HEADER);
    add_part(&move->file, slot_of(move) + HEADER, (size_t)length);
    add_part(&move->file, (uint8_t *)zeros, file_bytes_of(move->head) - end);
    return true;
}

/* (path, slot, seal.Column of the file) */
static bool hold_recall(Move *move, PyObject *given)
{
    PyObject *path, *slot, *filed;
    if (!parsed(given, "OOO", &path, &slot, &filed) || !hold_slot(move, path, slot, PyBUF_WRITABLE) ||
        !column_of(filed, &move->filed))
        return false;
    add_part(&move->file, move->head, HEADER); /* the slot's stays as it is */
    add_part(&move->file, slot_of(move) + HEADER, (size_t)move->file.held[0].len - HEADER);
    return true;
}

static PyObject *stored(const Move *move)
{
    (void)move;
    Py_RETURN_NONE;
}

static PyObject *loaded(const Move *move)
{
    return header_of(move->head, &move->filed);
}

typedef struct {
    bool (*hold)(Move *move, PyObject *given);
    void (*move)(Move *move, int flags, bool locked, const Py_buffer *bounce, PyThreadState **released);
    PyObject *(*answer)(const Move *move);
} Way;

static PyObject *answers_of(const Way *way, const Move *moves, Py_ssize_t count)
{
    PyObject *made = PyList_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        const Move *move = &moves[i];
        PyObject *answer = move->file.failed       ? error_of(move->file.failed, move->failed_at)
                           : move->miss == NO_MISS ? way->answer(move)
                                                   : Py_NewRef(misses[move->miss]);
        put_item(&made, i, answer);
    }
    return made;
}

static PyObject *each_column(
    const Way *way, PyObject *given, int flags, bool locked, PyObject *given_bounce)
{
    Py_buffer bounce = {.obj = NULL};
    Py_ssize_t held = 0;
    PyObject *made = NULL, *list = PySequence_Tuple(given);
    if (list == NULL)
        return NULL;
    const Py_ssize_t count = PyTuple_GET_SIZE(list);
    Move *moves = PyMem_Calloc((size_t)count + 1, sizeof(Move));
    if (moves == NULL)
        PyErr_NoMemory();
    else if (misses[0] == NULL)
        PyErr_SetString(PyExc_RuntimeError, "bind() has not been called");
    else if (hold_bounce(&bounce, given_bounce))
        while (held < count && way->hold(&moves[held], PyTuple_GET_ITEM(list, held)))
            held++;
    if (!PyErr_Occurred()) {
        PyThreadState *released = PyEval_SaveThread();
        for (Move *move = moves; move < moves + count; move++)
            way->move(move, flags, locked, &bounce, &released);
        PyEval_RestoreThread(released);
        if (!PyErr_Occurred())
            made = answers_of(way, moves, count);
    }
    for (Move *move = moves; moves != NULL && move < moves + count; move++) {
        Py_XDECREF(move->final);
        Py_XDECREF(move->victim);
        let_go_of_file(&move->file);
    }
    PyBuffer_Release(&bounce);
    PyMem_Free(moves);
    Py_DECREF(list);
    return made;
}

static PyObject *store_columns(PyObject *self, PyObject *arguments)
{
    (void)self;
    static const Way way = {hold_spill, store_one, stored};
    PyObject *given, *bounce;
    int flags, locked;
    if (!PyArg_ParseTuple(arguments, "OipO", &given, &flags, &locked, &bounce))
        return NULL;
    return each_column(&way, given, flags, locked, bounce);
}

static PyObject *load_columns(PyObject *self, PyObject *arguments)
{
    (void)self;
    static const Way way = {hold_recall, load_one, loaded};
    PyObject *given, *bounce;
    int flags;
    if (!PyArg_ParseTuple(arguments, "OiO", &given, &flags, &bounce))
        return NULL;
    return each_column(&way, given, flags, false, bounce);
}

int add_moves(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"store_columns", store_columns, METH_VARARGS, "files.store(columns, flags, locked, bounce)"},
        {"load_columns", load_columns, METH_VARARGS, "files.load(columns, flags, bounce)"},
        {NULL, NULL, 0, NULL},
    };
    return PyModule_AddFunctions(module, methods);
}
