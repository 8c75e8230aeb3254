/* Disks that fail as a test tells them to, for a process that is started with this in LD_PRELOAD.

   The control file (DISK_FAULTS) is mapped by the test and by all such processes: an array of rules, each
   for the files below one directory. The first active fault that fits decides about a call of the C library:
   it fails with an error, takes until the fault is not active any more, or reads one bit wrong. Who calls
   the kernel by itself is not met; kvss_agent and its compiled mover do not. See disks.py for the rules. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { RULES = 8, BELOW_BYTES = 476 };
enum { READ = 1, WRITE = 2, CREATE = 4, REMOVE = 8, SYNC = 16, LOOK = 32 };

typedef struct {
    uint32_t calls; /* of these kinds */
    int32_t error;  /* or 0 */
    uint32_t one_in; /* of so many names; the others are well */
    int64_t flip_at; /* the byte of a file that is read wrong, or -1 */
    uint32_t hangs;
    uint32_t met; /* calls so far */
} Fault;

typedef struct {
    volatile uint32_t active; /* which of its faults, from 1; or 0 */
    char below[BELOW_BYTES];
    Fault faults[2]; /* so that one is written while the other one is active */
} Rule;

static Rule *rules;

__attribute__((constructor)) static void begin(void)
{
    const char *control = getenv("DISK_FAULTS");
    const long fd = control ? syscall(SYS_openat, AT_FDCWD, control, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *memory = mmap(NULL, RULES * sizeof(Rule), PROT_READ | PROT_WRITE, MAP_SHARED, (int)fd, 0);
    syscall(SYS_close, fd);
    if (memory != MAP_FAILED)
        rules = memory;
}

static bool any_active(void)
{
    for (int i = 0; rules && i < RULES; i++)
        if (rules[i].active)
            return true;
    return false;
}

static bool is_hit(const Fault *fault, const char *path)
{
    uint32_t hash = 2166136261u;
    const char *name = strrchr(path, '/');
    for (name = name ? name + 1 : path; *name; name++)
        hash = (hash ^ (uint8_t)*name) * 16777619u;
    return fault->one_in < 2 || (hash >> 8) % fault->one_in == 0;
}

/* What decides about this call; it returns once none has it hang any more. */
static Fault *fault_for(const char *path, uint32_t call)
{
    for (int i = 0; rules && i < RULES; i++) {
        Rule *rule = &rules[i];
        const size_t length = strnlen(rule->below, BELOW_BYTES);
        const bool is_below = strncmp(path, rule->below, length) == 0 && (!path[length] || path[length] == '/');
        const uint32_t active = rule->active;
        Fault *fault = active && is_below ? &rule->faults[active - 1] : NULL;
        if (fault == NULL || !(fault->calls & call) || !is_hit(fault, path))
            continue;
        if (!fault->hangs)
            return fault;
        __atomic_add_fetch(&fault->met, 1, __ATOMIC_RELAXED);
        while (rule->active == active)
            nanosleep(&(struct timespec){0, 10 * 1000 * 1000}, NULL);
        i--; /* another fault may have followed */
    }
    return NULL;
}

/* The error that this call has to fail with, or 0. */
static int error_of(const char *path, uint32_t call)
{
    Fault *fault = fault_for(path, call);
    if (fault == NULL || fault->flip_at >= 0)
        return 0;
    __atomic_add_fetch(&fault->met, 1, __ATOMIC_RELAXED);
    return fault->error;
}

static bool path_of(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length > 0)
        path[length] = 0;
    return length > 0;
}

/* Whether the call fails, with errno. */
static bool fails_at(int folder, const char *name, uint32_t call)
{
    char path[2 * PATH_MAX];
    if (!any_active() || name == NULL)
        return false;
    const int before = errno;
    if (name[0] == '/')
        snprintf(path, sizeof path, "%s", name);
    else if (folder == AT_FDCWD ? getcwd(path, PATH_MAX) != NULL : path_of(folder, path))
        snprintf(path + strlen(path), PATH_MAX, "/%s", name);
    else
        return false;
    const int error = error_of(path, call);
    errno = error ? error : before;
    return error != 0;
}

static bool fails(int fd, uint32_t call)
{
    char path[PATH_MAX];
    const int before = errno;
    const int error = any_active() && path_of(fd, path) ? error_of(path, call) : 0;
    errno = error ? error : before;
    return error != 0;
}

/* What was read from here on is as the fault wants it. */
static ssize_t as_told(int fd, const struct iovec *parts, int count, off_t offset, ssize_t got)
{
    char path[PATH_MAX];
    const int before = errno;
    Fault *fault = got > 0 && any_active() && path_of(fd, path) ? fault_for(path, READ) : NULL;
    errno = before;
    if (fault == NULL || fault->flip_at < offset || fault->flip_at >= offset + got)
        return got;
    size_t at = (size_t)(fault->flip_at - offset);
    for (int i = 0; i < count; at -= parts[i++].iov_len)
        if (at < parts[i].iov_len) {
            ((uint8_t *)parts[i].iov_base)[at] ^= 1;
            __atomic_add_fetch(&fault->met, 1, __ATOMIC_RELAXED);
            break;
        }
    return got;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (real == NULL) \
    real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* Opening: for reading it is a look, and otherwise something may come of it. */

#define OPEN(name) \
    int name(const char *path, int flags, ...) \
    { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        if (fails_at(AT_FDCWD, path, (flags & O_ACCMODE) == O_RDONLY ? LOOK : CREATE)) \
            return -1; \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) \
    { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        if (fails_at(folder, path, (flags & O_ACCMODE) == O_RDONLY ? LOOK : CREATE)) \
            return -1; \
        return real(folder, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

DIR *opendir(const char *path)
{
    REAL(opendir);
    return fails_at(AT_FDCWD, path, LOOK) ? NULL : real(path);
}

/* Reading */

ssize_t read(int fd, void *into, size_t bytes)
{
    REAL(read);
    if (!any_active())
        return real(fd, into, bytes);
    if (fails(fd, READ))
        return -1;
    const int before = errno;
    const off_t offset = lseek(fd, 0, SEEK_CUR);
    errno = before;
    return as_told(fd, &(struct iovec){into, bytes}, 1, offset, real(fd, into, bytes));
}

#define PREAD(name) \
    ssize_t name(int fd, void *into, size_t bytes, off_t offset) \
    { \
        REAL(name); \
        if (fails(fd, READ)) \
            return -1; \
        return as_told(fd, &(struct iovec){into, bytes}, 1, offset, real(fd, into, bytes, offset)); \
    }
PREAD(pread)
PREAD(pread64)

#define PREADV(name) \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset) \
    { \
        REAL(name); \
        return fails(fd, READ) ? -1 : as_told(fd, parts, count, offset, real(fd, parts, count, offset)); \
    }
PREADV(preadv)
PREADV(preadv64)

#define PREADV2(name) \
    ssize_t name(int fd, const struct iovec *parts, int count, off_t offset, int flags) \
    { \
        REAL(name); \
        if (fails(fd, READ)) \
            return -1; \
        return as_told(fd, parts, count, offset, real(fd, parts, count, offset, flags)); \
    }
PREADV2(preadv2)
PREADV2(preadv64v2)

/* Writing, and all that a call with these arguments asks for. */

#define CALL(result, name, failure, condition, arguments, ...) \
    result name arguments \
    { \
        REAL(name); \
        return (condition) ? (failure) : real(__VA_ARGS__); \
    }
CALL(ssize_t, write, -1, fails(fd, WRITE), (int fd, const void *from, size_t bytes), fd, from, bytes)
CALL(ssize_t, writev, -1, fails(fd, WRITE), (int fd, const struct iovec *parts, int count), fd, parts, count)

#define PWRITES(suffix) \
    CALL(ssize_t, pwrite##suffix, -1, fails(fd, WRITE), \
        (int fd, const void *from, size_t bytes, off_t offset), fd, from, bytes, offset) \
    CALL(ssize_t, pwritev##suffix, -1, fails(fd, WRITE), \
        (int fd, const struct iovec *parts, int count, off_t offset), fd, parts, count, offset) \
    CALL(ssize_t, pwritev##suffix##v2, -1, fails(fd, WRITE), \
        (int fd, const struct iovec *parts, int count, off_t offset, int flags), fd, parts, count, offset, flags)
#define pwritevv2 pwritev2 /* the name has no suffix then */
PWRITES()
PWRITES(64)

CALL(int, fsync, -1, fails(fd, SYNC), (int fd), fd)
CALL(int, fdatasync, -1, fails(fd, SYNC), (int fd), fd)
CALL(int, futimens, -1, fails(fd, CREATE), (int fd, const struct timespec times[2]), fd, times)

/* Names */

/* As the kernel has it, a folder that is there is there, also where none can be made. */
static bool mkdir_fails(int folder, const char *path)
{
    struct stat seen;
    if (!fails_at(folder, path, CREATE))
        return false;
    const int error = errno;
    errno = syscall(SYS_newfstatat, folder, path, &seen, AT_SYMLINK_NOFOLLOW) == 0 ? EEXIST : error;
    return true;
}
CALL(int, mkdir, -1, mkdir_fails(AT_FDCWD, path), (const char *path, mode_t mode), path, mode)
CALL(int, mkdirat, -1, mkdir_fails(at, path), (int at, const char *path, mode_t mode), at, path, mode)
CALL(int, rename, -1, fails_at(AT_FDCWD, from, CREATE) || fails_at(AT_FDCWD, to, CREATE),
    (const char *from, const char *to), from, to)
CALL(int, linkat, -1, fails_at(there, to, CREATE),
    (int at, const char *from, int there, const char *to, int flags), at, from, there, to, flags)
CALL(int, renameat, -1, fails_at(at, from, CREATE) || fails_at(there, to, CREATE),
    (int at, const char *from, int there, const char *to), at, from, there, to)
CALL(int, unlink, -1, fails_at(AT_FDCWD, path, REMOVE), (const char *path), path)
CALL(int, unlinkat, -1, fails_at(at, path, REMOVE), (int at, const char *path, int flags), at, path, flags)
CALL(int, rmdir, -1, fails_at(AT_FDCWD, path, REMOVE), (const char *path), path)

/* Looks */

CALL(int, stat, -1, fails_at(AT_FDCWD, path, LOOK), (const char *path, struct stat *into), path, into)
CALL(int, lstat, -1, fails_at(AT_FDCWD, path, LOOK), (const char *path, struct stat *into), path, into)
CALL(int, stat64, -1, fails_at(AT_FDCWD, path, LOOK), (const char *path, struct stat64 *into), path, into)
CALL(int, lstat64, -1, fails_at(AT_FDCWD, path, LOOK), (const char *path, struct stat64 *into), path, into)
CALL(int, fstatat, -1, fails_at(at, path, LOOK),
    (int at, const char *path, struct stat *into, int flags), at, path, into, flags)
CALL(int, fstatat64, -1, fails_at(at, path, LOOK),
    (int at, const char *path, struct stat64 *into, int flags), at, path, into, flags)
