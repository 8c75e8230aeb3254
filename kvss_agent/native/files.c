/* Whole files, several at a time: what tier2/files.py does, one system call after the other, without the
   interpreter in between. A direct file gives and takes whole pages, so what is left after a short write
   or read begins with a page.

   Justified by tier2.spill.64KiB and tier2.recall.64KiB: 53 to 68 and 40 to 53 us a column; in Python it
   takes 68 to 89 and 49 to 70. */

#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

void let_go_of_file(File *file)
{
    while (file->holding > 0)
        PyBuffer_Release(&file->held[--file->holding]);
    Py_CLEAR(file->path);
    Py_CLEAR(file->given_path);
}

static void let_go_of_files(File *files, Py_ssize_t count, Py_buffer *bounce)
{
    for (File *file = files; file < files + count; file++)
        let_go_of_file(file);
    PyMem_Free(files);
    PyBuffer_Release(bounce);
}

bool hold_path(File *file, PyObject *given)
{
    file->given_path = Py_NewRef(given);
    return PyUnicode_FSConverter(given, &file->path);
}

/* Its memory is not unmapped before it is let go. */
bool hold_buffer(File *file, PyObject *given, int how)
{
    return PyObject_GetBuffer(given, &file->held[file->holding], how) == 0 && ++file->holding;
}

void add_part(File *file, void *from, size_t bytes)
{
    file->part[file->parts++] = (struct iovec){from, bytes};
    file->bytes += bytes;
}

static bool hold_file(File *file, PyObject *given, int how)
{
    PyObject *path, *given_parts;
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "OO", &path, &given_parts)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a file is a tuple: path and parts");
        return false;
    }
    PyObject *parts = hold_path(file, path) ? PySequence_Tuple(given_parts) : NULL;
    if (parts == NULL)
        return false;
    const Py_ssize_t count = PyTuple_GET_SIZE(parts);
    if (count > PARTS_MAX)
        PyErr_Format(PyExc_ValueError, "a file has up to %d parts, not %zd", PARTS_MAX, count);
    while (!PyErr_Occurred() && file->parts < count)
        if (hold_buffer(file, PyTuple_GET_ITEM(parts, file->parts), how))
            add_part(file, file->held[file->parts].buf, (size_t)file->held[file->parts].len);
    Py_DECREF(parts);
    return !PyErr_Occurred();
}

/* Memory that bytes go through, or None. */
bool hold_bounce(Py_buffer *bounce, PyObject *given)
{
    *bounce = (Py_buffer){.obj = NULL};
    if (given == Py_None)
        return true;
    if (PyObject_GetBuffer(given, bounce, PyBUF_WRITABLE) < 0)
        return false;
    if (bounce->len > 0)
        return true;
    PyBuffer_Release(bounce);
    PyErr_SetString(PyExc_ValueError, "nothing can go through a bounce of no bytes");
    return false;
}

/* The files that are asked for, and the memory that their bytes go through. NULL with an exception. */
static File *hold_files(PyObject *given, int how, PyObject *given_bounce, Py_ssize_t *count, Py_buffer *bounce)
{
    PyObject *list = PySequence_Tuple(given);
    if (list == NULL)
        return NULL;
    Py_ssize_t held = 0;
    File *files = PyMem_Calloc((size_t)PyTuple_GET_SIZE(list) + 1, sizeof(File));
    *count = PyTuple_GET_SIZE(list);
    if (files == NULL)
        PyErr_NoMemory();
    else if (hold_bounce(bounce, given_bounce))
        while (held < *count && hold_file(&files[held], PyTuple_GET_ITEM(list, held), how))
            held++;
    if (files != NULL && PyErr_Occurred()) {
        let_go_of_files(files, *count, bounce);
        files = NULL;
    }
    Py_DECREF(list);
    return files;
}

PyObject *error_of(int number, PyObject *path)
{
    return PyObject_CallFunction(PyExc_OSError, "isO", number, strerror(number), path);
}

/* For each file the number that has come of it, or the kernel's refusal. */
static PyObject *answers_of(const File *files, Py_ssize_t count)
{
    PyObject *made = PyList_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        PyObject *answer = files[i].failed ? error_of(files[i].failed, files[i].given_path)
                                           : PyLong_FromSize_t(files[i].done);
        put_item(&made, i, answer);
    }
    return made;
}

/* Where the bytes of a file from what is done on lie, at most `room` of them. */
static int rest_of(const File *file, size_t room, struct iovec *rest)
{
    int count = 0;
    size_t skipped = file->done;
    for (int i = 0; i < file->parts && room > 0; i++) {
        const size_t length = file->part[i].iov_len;
        const size_t bytes = length <= skipped ? 0 : length - skipped < room ? length - skipped : room;
        if (bytes > 0)
            rest[count++] = (struct iovec){(uint8_t *)file->part[i].iov_base + skipped, bytes};
        skipped -= length < skipped ? length : skipped;
        room -= bytes;
    }
    return count;
}

static ssize_t write_some(const File *file, const Py_buffer *bounce)
{
    struct iovec rest[PARTS_MAX];
    const bool any = bounce->obj != NULL;
    const int count = rest_of(file, any ? (size_t)bounce->len : SIZE_MAX, rest);
    if (!any)
        return pwritev(file->fd, rest, count, (off_t)file->done);
    size_t bytes = 0;
    for (int i = 0; i < count; bytes += rest[i++].iov_len)
        memcpy((uint8_t *)bounce->buf + bytes, rest[i].iov_base, rest[i].iov_len);
    return pwrite(file->fd, bounce->buf, bytes, (off_t)file->done);
}

static ssize_t read_some(const File *file, const Py_buffer *bounce)
{
    struct iovec rest[PARTS_MAX];
    if (bounce->obj == NULL)
        return preadv(file->fd, rest, rest_of(file, SIZE_MAX, rest), (off_t)file->done);
    const size_t left = file->bytes - file->done, room = (size_t)bounce->len;
    const ssize_t got = pread(file->fd, bounce->buf, left < room ? left : room, (off_t)file->done);
    const uint8_t *from = bounce->buf;
    const int count = got > 0 ? rest_of(file, (size_t)got, rest) : 0;
    for (int i = 0; i < count; from += rest[i++].iov_len)
        memcpy(rest[i].iov_base, from, rest[i].iov_len);
    return got;
}

/* Whether the file could be opened there. */
static bool opened(File *file, const char *path, int flags)
{
    do
        file->fd = open(path, flags, 0600);
    while (file->fd < 0 && errno == EINTR);
    file->failed = file->fd < 0 ? errno : 0;
    return file->fd >= 0;
}

static bool are_nameless(int flags)
{
    return (flags & O_TMPFILE) == O_TMPFILE;
}

/* The flags of a file that has a name already. */
int of_named(int flags)
{
    return flags & ~(O_TMPFILE | O_CREAT | O_EXCL);
}

/* Whether a file could be made under this name, or in its directory without one. */
static bool created(File *file, int flags)
{
    const char *path = PyBytes_AS_STRING(file->path), *name = strrchr(path, '/');
    char folder[PATH_MAX];
    if (!are_nameless(flags))
        return opened(file, path, flags);
    const size_t length = name ? (size_t)(name - path) : 0;
    if (length >= sizeof folder) {
        file->failed = ENAMETOOLONG;
        return false;
    }
    memcpy(folder, path, length);
    folder[length] = 0;
    return opened(file, folder, flags);
}

void discard_one(const File *file)
{
    unlink(PyBytes_AS_STRING(file->path)); /* if it has a name yet */
    close(file->fd);
}

void stage_one(File *file, int flags, bool locked, const Py_buffer *bounce)
{
    if (!created(file, flags))
        return;
    locked = locked && !are_nameless(flags); /* nobody sees a file that has no name */
    if (locked && flock(file->fd, LOCK_EX | LOCK_NB) < 0)
        file->failed = errno;
    /* Before it was locked it looked like a dead writer's: it may have been swept. */
    struct stat status;
    if (locked && !file->failed && fstat(file->fd, &status) == 0 && status.st_nlink == 0)
        file->failed = ENOENT;
    fill_one(file, bounce);
}

/* Write all of the file; of one that fails nothing is left. */
void fill_one(File *file, const Py_buffer *bounce)
{
    while (!file->failed && file->done < file->bytes) {
        const ssize_t some = write_some(file, bounce);
        if (some >= 0)
            file->done += (size_t)some;
        else if (errno != EINTR)
            file->failed = errno;
    }
    if (file->failed)
        discard_one(file);
}

/* Whether this file is written over the one that the victim leaves: it has the unfinished name now, and is locked
   and as large. In any case the victim is gone, unless the file has failed. */
bool took_over(File *file, const char *victim, int flags, bool locked)
{
    const char *unfinished = PyBytes_AS_STRING(file->path);
    const bool may = are_nameless(flags) && locked; /* on a disk of this machine */
    const int fd = may ? open(victim, of_named(flags) | O_NOFOLLOW | O_NONBLOCK) : -1;
    struct stat status, named;
    bool taken = false;
    if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0 && rename(victim, unfinished) == 0) {
        /* It may not be what was renamed: before the lock another agent may have stored it under another name.
           And with two names it is somebody's copy as well. */
        taken = fstat(fd, &status) == 0 && lstat(unfinished, &named) == 0 && status.st_ino == named.st_ino &&
                status.st_dev == named.st_dev && S_ISREG(status.st_mode) && status.st_nlink == 1 &&
                status.st_size == (off_t)file->bytes;
        if (!taken)
            unlink(unfinished);
    } else if (unlink(victim) < 0 && errno != ENOENT && errno != ESTALE)
        file->failed = errno;
    if (taken)
        file->fd = fd;
    else if (fd >= 0)
        close(fd);
    return taken;
}

/* Give a file that has no name this one. Where another file has it, a temporary name has to do first, since only
   a rename replaces: it is locked before others see it. */
static int linked(int fd, const char *unfinished, const char *path, bool locked)
{
    char source[64];
    snprintf(source, sizeof source, "/proc/self/fd/%d", fd);
    if (linkat(AT_FDCWD, source, AT_FDCWD, path, AT_SYMLINK_FOLLOW) == 0)
        return 0;
    if (errno != EEXIST || (locked && flock(fd, LOCK_EX | LOCK_NB) < 0))
        return -1;
    if (linkat(AT_FDCWD, source, AT_FDCWD, unfinished, AT_SYMLINK_FOLLOW) < 0)
        return -1;
    return rename(unfinished, path);
}

int publish_one(int fd, const char *unfinished, const char *path, int flags, bool locked)
{
    const bool done = (are_nameless(flags) ? linked(fd, unfinished, path, locked) : rename(unfinished, path)) == 0;
    const int failed = done ? 0 : errno;
    if (!done)
        unlink(unfinished);
    close(fd);
    return failed;
}

void fetch_one(File *file, int flags, const Py_buffer *bounce)
{
    ssize_t some = PAGE;
    if (!opened(file, PyBytes_AS_STRING(file->path), flags))
        return;
    while (!file->failed && file->done < file->bytes && some > 0 && (bounce->obj == NULL || some % PAGE == 0)) {
        do
            some = read_some(file, bounce);
        while (some < 0 && errno == EINTR);
        if (some >= 0)
            file->done += (size_t)some;
        else
            file->failed = errno;
    }
    close(file->fd);
}

static PyObject *stage_files(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *given, *given_bounce;
    Py_buffer bounce;
    Py_ssize_t count;
    int flags, locked;
    if (!PyArg_ParseTuple(arguments, "OipO", &given, &flags, &locked, &given_bounce))
        return NULL;
    File *files = hold_files(given, PyBUF_SIMPLE, given_bounce, &count, &bounce);
    if (files == NULL)
        return NULL;
    PyThreadState *released = PyEval_SaveThread();
    for (File *file = files; file < files + count; file++)
        stage_one(file, flags, locked, &bounce);
    PyEval_RestoreThread(released);
    for (File *file = files; file < files + count; file++)
        file->done = (size_t)file->fd;
    PyObject *made = answers_of(files, count);
    let_go_of_files(files, count, &bounce);
    return made;
}

static PyObject *fetch_files(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *given, *given_bounce;
    Py_buffer bounce;
    Py_ssize_t count;
    int flags;
    if (!PyArg_ParseTuple(arguments, "OiO", &given, &flags, &given_bounce))
        return NULL;
    File *files = hold_files(given, PyBUF_WRITABLE, given_bounce, &count, &bounce);
    if (files == NULL)
        return NULL;
    PyThreadState *released = PyEval_SaveThread();
    for (File *file = files; file < files + count; file++)
        fetch_one(file, flags, &bounce);
    PyEval_RestoreThread(released);
    PyObject *made = answers_of(files, count);
    let_go_of_files(files, count, &bounce);
    return made;
}

static PyObject *publish_files(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *given, *staged, *made = NULL;
    int flags, locked;
    if (!PyArg_ParseTuple(arguments, "Oip", &given, &flags, &locked))
        return NULL;
    if ((staged = PySequence_Tuple(given)) == NULL)
        return NULL;
    const Py_ssize_t count = PyTuple_GET_SIZE(staged);
    struct { int fd, failed; const char *from, *to; } *jobs = PyMem_Calloc((size_t)count + 1, sizeof *jobs);
    if (jobs == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *one = PyTuple_GET_ITEM(staged, i);
        if (!PyTuple_Check(one)) {
            PyErr_SetString(PyExc_TypeError, "what is published is a tuple: fd, unfinished and path");
            goto done;
        }
        if (!PyArg_ParseTuple(one, "iss", &jobs[i].fd, &jobs[i].from, &jobs[i].to))
            goto done;
    }
    PyThreadState *released = PyEval_SaveThread();
    for (Py_ssize_t i = 0; i < count; i++)
        jobs[i].failed = publish_one(jobs[i].fd, jobs[i].from, jobs[i].to, flags, locked);
    PyEval_RestoreThread(released);
    made = PyList_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        PyObject *path = PyTuple_GET_ITEM(PyTuple_GET_ITEM(staged, i), 1);
        PyObject *answer = jobs[i].failed ? error_of(jobs[i].failed, path) : Py_NewRef(Py_None);
        put_item(&made, i, answer);
    }
done:
    PyMem_Free(jobs);
    Py_DECREF(staged);
    return made;
}

int add_files(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"stage_files", stage_files, METH_VARARGS, "files.stage(files, flags, locked, bounce)"},
        {"publish_files", publish_files, METH_VARARGS, "files.publish(staged, flags, locked)"},
        {"fetch_files", fetch_files, METH_VARARGS, "files.fetch(files, flags, bounce)"},
        {NULL, NULL, 0, NULL},
    };
    return PyModule_AddFunctions(module, methods);
}
