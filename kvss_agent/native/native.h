/* What the parts of the compiled mover share. Each part names, at its head, the benchmark that justifies it:
   rows of `make bench NAME=dataplane` in docs/benchmarks.md, with and without ".native". */
#ifndef TIDEGATE_NATIVE_H
#define TIDEGATE_NATIVE_H

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#define FAST(function) (PyCFunction)(void (*)(void))function, METH_FASTCALL

#ifdef __GNUC__
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) (void)(address)
#endif

enum { SHORT_MAX = 240, STRIPE = 64, PAGE = 4096, FIRST_LINES = 16, HEADER = 64 };

/* Where the fields of a header are; seal.py explains them. */
enum { AT_TOKENS = 6, AT_SEQUENCE = 8, AT_KEY = 16, AT_TAG = 32, AT_CHECKSUM = 48, AT_LENGTH = 56, CHECKED = 60 };
static const uint64_t PAYLOAD_MAX = 1 << 30;

/* Prefetches the beginning of a payload, and the second page of where it goes to. */
static inline void prefetch_first(const uint8_t *into, const uint8_t *from, size_t length)
{
    for (size_t at = 0; at < length && at < FIRST_LINES * STRIPE; at += STRIPE)
        PREFETCH(from + at);
    if (into != NULL && length > PAGE)
        PREFETCH(into + PAGE);
}

/* Puts an item into a new list, which is dropped where there is none. */
static inline void put_item(PyObject **list, Py_ssize_t at, PyObject *item)
{
    if (item == NULL)
        Py_CLEAR(*list);
    else
        PyList_SET_ITEM(*list, at, item);
}

/* kernels.c */

enum store { NOT_AT_ALL, PLAIN, STREAMED };

extern int levels_found;

void find_levels(void);
const char *name_of_level(int index);
bool use_level(const char *name);
uint64_t copied(uint8_t *into, const uint8_t *from, size_t length, enum store how);

/* The checksum of more than SHORT_MAX bytes that arrive bit by bit. */
typedef struct {
    uint64_t lanes[8];
    size_t summed;
} Sum;

void begin_sum(Sum *sum);
void sum_up_to(Sum *sum, const uint8_t *payload, size_t arrived, size_t length);
uint64_t end_sum(Sum *sum, const uint8_t *payload, size_t length);

uint32_t check_of_header(const uint8_t *header);

/* payloads.c */

extern const size_t STREAM_IN_FROM, STREAM_OUT_FROM;

bool moved_payload(uint8_t *into, const uint8_t *from, size_t length, size_t stream_from, uint64_t *sum);
int add_payloads(PyObject *module);

/* columns.c */

enum miss { NO_MISS = -1, ABSENT, TORN, STALE, FOREIGN, CORRUPT, MISSES };
extern PyObject *misses[MISSES]; /* seal.Miss, in this order */

typedef struct {
    const uint8_t *key, *tag;
    uint64_t sequence;
    PyObject *key_object, *tag_object;
} Column;

uint64_t get(const uint8_t *at, int bytes);
bool set_names(Column *column, PyObject *key, PyObject *tag);
bool column_of(PyObject *given, Column *column);
void make_header(uint8_t header[HEADER], const Column *column, uint64_t tokens, uint64_t length, uint64_t checksum);
enum miss identified(const uint8_t *header, const Column *column);
PyObject *header_of(const uint8_t *header, const Column *column);
enum miss seal_arrived(uint8_t *slot, const Column *column, const uint8_t *said, uint64_t sum);
bool write_slot(uint8_t *slot, Py_ssize_t room, const Column *column, PyObject *tokens, PyObject *payload);
PyObject *read_slot(const uint8_t *slot, Py_ssize_t room, PyObject *column, PyObject *into);
int add_columns(PyObject *module);

/* window.c */

int add_window(PyObject *module);

/* files.c */

enum { PARTS_MAX = 8 };

typedef struct {
    PyObject *given_path, *path; /* as it was given, and in bytes */
    Py_buffer held[PARTS_MAX];   /* what the parts are in */
    struct iovec part[PARTS_MAX];
    int holding, parts, fd, failed; /* by which errno, or 0 */
    size_t bytes, done;
} File;

bool hold_path(File *file, PyObject *given);
bool hold_buffer(File *file, PyObject *given, int how);
void add_part(File *file, void *from, size_t bytes);
void let_go_of_file(File *file);
bool hold_bounce(Py_buffer *bounce, PyObject *given);
void stage_one(File *file, int flags, bool locked, const Py_buffer *bounce);
bool took_over(File *file, const char *victim, int flags, bool locked);
void fill_one(File *file, const Py_buffer *bounce);
int of_named(int flags);
void discard_one(const File *file);
int publish_one(int fd, const char *unfinished, const char *path, int flags, bool locked);
void fetch_one(File *file, int flags, const Py_buffer *bounce);
PyObject *error_of(int number, PyObject *path);
int add_files(PyObject *module);

/* moves.c */

int add_moves(PyObject *module);

/* receive.c */

int add_receive(PyObject *module);

/* blocks.c */

int add_blocks(PyObject *module);

/* fields.c */

int add_fields(PyObject *module);

/* prompts.c */

int add_prompts(PyObject *module);

#endif
