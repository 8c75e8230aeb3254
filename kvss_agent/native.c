/* The mover in compiled code: a payload is read once, and copied and checked in that one pass.

   It does what PythonMover in mover.py does and gives the same checksums: XXH3-64, seed 0, written after
   the published specification of the algorithm. Its short inputs (up to 240 bytes, four algorithms of
   their own) stay with the xxhash package: no column is that short, and so this file is.

   A checksum is of the bytes that were stored, whatever another process does to the source meanwhile:
   each byte is loaded once, and what was loaded is both stored and summed, or it is summed where it
   was stored. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(TIDEGATE_PORTABLE)
#define WITH_AVX
#include <immintrin.h>
#endif

enum { SHORT_MAX = 240, STRIPE = 64, STRIPES = 16, BLOCK = STRIPE * STRIPES, LANES = 8 };

/* From how many bytes on a copy goes around the cache ("streamed"). A plain store first reads the line
   that it overwrites; a streamed one does not, but whoever reads next has to fetch it from memory.
   Measured on a Zen 5 (1 MiB of L2 a core, 32 MiB of L3) over far more memory than its caches hold:

   Into a slot, streaming is as fast from 16 KiB on and faster beyond; of a payload of 64 KiB to 16 MiB
   it makes 1.1 to 1.4 times the speed of memcpy if the source is cold, up to 1.8 times if it is warm.

   Out of a slot, from 64 KiB on, it makes 1.3 to 1.4 times the speed of plain stores if `into` is cold,
   and the same if it is warm. A core that reads all of it right after loses that again: of 64 KiB, both
   steps together take 1.1 times as long, or 1.4 times if `into` was warm; from 1 MiB on, cold, they
   gain. But columns are read next by a device, and the cache belongs to those who compute. */
static const size_t STREAM_IN_FROM = 16 << 10, STREAM_OUT_FROM = 64 << 10;

/* What a machine fetches by itself ends with the page, and finding the next one takes a walk through two
   tables in a virtual machine, with stores queueing up behind it. So one line of it is asked for a page
   ahead, on both sides, and the first lines of all as soon as they are known. Measured as above this
   makes 1.03 to 1.25 times the speed from 64 KiB to 1 MiB. Asking for every line, at any distance, gains
   less, and so did working on several pages at once, which XXH3 would allow. */
enum { PAGE = 4096, FIRST_LINES = 16 };

/* Below this, giving the interpreter away and waiting to have it back costs more than the copy. */
static const size_t RELEASE_FROM = 16 << 10;

enum store { NOT_AT_ALL, PLAIN, STREAMED };

/* Constants of the specification. */
static const uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F;
static const uint64_t PRIME64_3 = 0x165667B19E3779F9, PRIME64_4 = 0x85EBCA77C2B2AE63;
static const uint64_t PRIME64_5 = 0x27D4EB2F165667C5, PRIME_MIX = 0x165667919E3779F9;
enum { SECRET_OF_SCRAMBLE = 128, SECRET_OF_LAST_STRIPE = 121, SECRET_OF_MERGE = 11 };
static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#ifdef __GNUC__
#define ASK_FOR(address) __builtin_prefetch(address)
#else
#define ASK_FOR(address) (void)(address)
#endif

static inline void ask_for_first(const uint8_t *into, const uint8_t *from, size_t length)
{
    for (size_t at = 0; at < length && at < FIRST_LINES * STRIPE; at += STRIPE)
        ASK_FOR(from + at);
    if (into != NULL && length > PAGE)
        ASK_FOR(into + PAGE);
}

/* At the beginning of each block: at most two pages begin in four of them. */
static inline void ask_for_next(const uint8_t *into, const uint8_t *from, size_t stripes, enum store how)
{
    if (stripes <= PAGE / STRIPE)
        return;
    if ((uintptr_t)from % PAGE < BLOCK)
        ASK_FOR(from + PAGE);
    if (how != NOT_AT_ALL && (uintptr_t)into % PAGE < BLOCK)
        ASK_FOR(into + PAGE);
}

/* Whole stripes, one of these per kind of machine: copy as `how` says, add to the sums, and scramble these
   after each block. What is behind the last block is not streamed, since some of it may be read again. */
typedef void Stripes(
    uint64_t sums[LANES], uint8_t *into, const uint8_t *from, size_t count, enum store how);

static uint64_t word_at(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static inline void add_stripe(uint64_t sums[LANES], const uint8_t *stripe, const uint8_t *secret)
{
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t word = word_at(stripe + 8 * lane), mixed = word ^ word_at(secret + 8 * lane);
        sums[lane ^ 1] += word;
        sums[lane] += (mixed & 0xFFFFFFFF) * (mixed >> 32);
    }
}

static void stripes_portable(
    uint64_t sums[LANES], uint8_t *into, const uint8_t *from, size_t count, enum store how)
{
    uint64_t all[LANES]; /* which no store to `into` can change, so that they stay in registers */
    memcpy(all, sums, sizeof all);
    while (count > 0) {
        const size_t now = count < STRIPES ? count : STRIPES;
        const uint8_t *stored = how == NOT_AT_ALL ? from : memcpy(into, from, now * STRIPE);
        ask_for_next(into, from, count, how);
        for (size_t stripe = 0; stripe < now; stripe++)
            add_stripe(all, stored + stripe * STRIPE, SECRET + 8 * stripe);
        for (int lane = 0; now == STRIPES && lane < LANES; lane++) {
            all[lane] ^= all[lane] >> 47 ^ word_at(SECRET + SECRET_OF_SCRAMBLE + 8 * lane);
            all[lane] *= PRIME32_1;
        }
        from += now * STRIPE;
        into += how == NOT_AT_ALL ? 0 : now * STRIPE;
        count -= now;
    }
    memcpy(sums, all, sizeof all);
}

#ifdef WITH_AVX

/* The empty assembly keeps the compiler from loading a stripe twice, once to store and once to sum it.
   `how` is a constant where these are inlined, so that the loops have no branches. */
#define INLINED(target_) static inline __attribute__((always_inline, target(target_)))
#define LOADED_ONCE(vector) __asm__("" : "+v"(vector))

INLINED("avx512f")
__m512i scrambled_avx512(__m512i sums)
{
    const __m512i prime = _mm512_set1_epi64((long long)PRIME32_1);
    sums = _mm512_xor_si512(sums, _mm512_srli_epi64(sums, 47));
    sums = _mm512_xor_si512(sums, _mm512_loadu_si512(SECRET + SECRET_OF_SCRAMBLE));
    const __m512i upper = _mm512_mul_epu32(_mm512_srli_epi64(sums, 32), prime);
    return _mm512_add_epi64(_mm512_mul_epu32(sums, prime), _mm512_slli_epi64(upper, 32));
}

INLINED("avx512f")
__m512i with_stripe_avx512(
    __m512i sums, uint8_t *into, const uint8_t *from, const uint8_t *secret, enum store how)
{
    __m512i data = _mm512_loadu_si512(from);
    LOADED_ONCE(data);
    if (how == PLAIN)
        _mm512_storeu_si512(into, data);
    else if (how == STREAMED)
        _mm512_stream_si512((void *)into, data);
    const __m512i mixed = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
    const __m512i product = _mm512_mul_epu32(mixed, _mm512_srli_epi64(mixed, 32));
    return _mm512_add_epi64(sums, _mm512_add_epi64(product, _mm512_shuffle_epi32(data, _MM_PERM_BADC)));
}

INLINED("avx512f")
void stripes_avx512_as(
    uint64_t sums[LANES], uint8_t *into, const uint8_t *from, size_t count, enum store how)
{
    const size_t step = how == NOT_AT_ALL ? 0 : STRIPE;
    __m512i all = _mm512_loadu_si512(sums);
    for (; count >= STRIPES; count -= STRIPES) {
        ask_for_next(into, from, count, how);
        for (int stripe = 0; stripe < STRIPES; stripe++, from += STRIPE, into += step)
            all = with_stripe_avx512(all, into, from, SECRET + 8 * stripe, how);
        all = scrambled_avx512(all);
    }
    for (size_t stripe = 0; stripe < count; stripe++, from += STRIPE, into += step)
        all = with_stripe_avx512(all, into, from, SECRET + 8 * stripe, how == STREAMED ? PLAIN : how);
    _mm512_storeu_si512(sums, all);
}

INLINED("avx2")
__m256i scrambled_avx2(__m256i sums, const uint8_t *secret)
{
    const __m256i prime = _mm256_set1_epi64x((long long)PRIME32_1);
    sums = _mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47));
    sums = _mm256_xor_si256(sums, _mm256_loadu_si256((const __m256i *)secret));
    const __m256i upper = _mm256_mul_epu32(_mm256_srli_epi64(sums, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(sums, prime), _mm256_slli_epi64(upper, 32));
}

INLINED("avx2")
__m256i with_half_stripe_avx2(
    __m256i sums, uint8_t *into, const uint8_t *from, const uint8_t *secret, enum store how)
{
    __m256i data = _mm256_loadu_si256((const __m256i *)from);
    LOADED_ONCE(data);
    if (how == PLAIN)
        _mm256_storeu_si256((__m256i *)into, data);
    else if (how == STREAMED)
        _mm256_stream_si256((__m256i *)into, data);
    const __m256i mixed = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i *)secret));
    const __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    return _mm256_add_epi64(sums, _mm256_add_epi64(product, swapped));
}

INLINED("avx2")
void stripes_avx2_as(
    uint64_t sums[LANES], uint8_t *into, const uint8_t *from, size_t count, enum store how)
{
    const size_t half = STRIPE / 2, step = how == NOT_AT_ALL ? 0 : STRIPE;
    __m256i lower = _mm256_loadu_si256((const __m256i *)sums);
    __m256i upper = _mm256_loadu_si256((const __m256i *)(sums + LANES / 2));
    for (; count >= STRIPES; count -= STRIPES) {
        ask_for_next(into, from, count, how);
        for (int stripe = 0; stripe < STRIPES; stripe++, from += STRIPE, into += step) {
            const uint8_t *secret = SECRET + 8 * stripe;
            lower = with_half_stripe_avx2(lower, into, from, secret, how);
            upper = with_half_stripe_avx2(upper, into + step / 2, from + half, secret + half, how);
        }
        lower = scrambled_avx2(lower, SECRET + SECRET_OF_SCRAMBLE);
        upper = scrambled_avx2(upper, SECRET + SECRET_OF_SCRAMBLE + half);
    }
    how = how == STREAMED ? PLAIN : how;
    for (size_t stripe = 0; stripe < count; stripe++, from += STRIPE, into += step) {
        const uint8_t *secret = SECRET + 8 * stripe;
        lower = with_half_stripe_avx2(lower, into, from, secret, how);
        upper = with_half_stripe_avx2(upper, into + step / 2, from + half, secret + half, how);
    }
    _mm256_storeu_si256((__m256i *)sums, lower);
    _mm256_storeu_si256((__m256i *)(sums + LANES / 2), upper);
}

#define DEFINE_STRIPES(name, target_)                                                               \
    __attribute__((target(target_))) static void name(                                             \
        uint64_t sums[LANES], uint8_t *into, const uint8_t *from, size_t count, enum store how)    \
    {                                                                                              \
        if (how == NOT_AT_ALL)                                                                     \
            name##_as(sums, into, from, count, NOT_AT_ALL);                                        \
        else if (how == PLAIN)                                                                     \
            name##_as(sums, into, from, count, PLAIN);                                             \
        else                                                                                       \
            name##_as(sums, into, from, count, STREAMED);                                          \
    }

DEFINE_STRIPES(stripes_avx512, "avx512f")
DEFINE_STRIPES(stripes_avx2, "avx2")

#endif

/* What this machine can run, best first, and which of it is used. Found when the module is loaded. */
typedef struct {
    const char *name;
    Stripes *stripes;
} Level;

static Level levels[3];
static int levels_found;
static Stripes *stripes_used;

static void find_levels(void)
{
    levels_found = 0;
#ifdef WITH_AVX
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        levels[levels_found++] = (Level){"avx512", stripes_avx512};
    if (__builtin_cpu_supports("avx2"))
        levels[levels_found++] = (Level){"avx2", stripes_avx2};
#endif
    levels[levels_found++] = (Level){"portable", stripes_portable};
    stripes_used = levels[0].stripes;
}

/* The 128-bit product of two words, its halves folded into one. Not every machine has such a type. */
static uint64_t folded_product(uint64_t left, uint64_t right)
{
    const uint64_t a = left & 0xFFFFFFFF, b = left >> 32, c = right & 0xFFFFFFFF, d = right >> 32;
    const uint64_t low = a * c, one = b * c, other = a * d, high = b * d;
    const uint64_t middle = (low >> 32) + (one & 0xFFFFFFFF) + other;
    return (high + (one >> 32) + (middle >> 32)) ^ (middle << 32 | (low & 0xFFFFFFFF));
}

/* Copy more than SHORT_MAX bytes, unless `how` says not to; their checksum. */
static uint64_t moved(Stripes *stripes, uint8_t *into, const uint8_t *from, size_t length, enum store how)
{
    uint64_t sums[LANES] = {
        PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
    };
    /* The last stripe, which is a whole one even if it overlaps with what is before it, has a secret of its
       own, and is summed where it is stored. */
    const size_t whole = (length - 1) / STRIPE, rest = length - whole * STRIPE;
    ask_for_first(how == NOT_AT_ALL ? NULL : into, from, length);
    stripes(sums, into, from, whole, how);
    if (how != NOT_AT_ALL) {
        memcpy(into + length - rest, from + length - rest, rest);
        from = into;
    }
    add_stripe(sums, from + length - STRIPE, SECRET + SECRET_OF_LAST_STRIPE);

    uint64_t merged = length * PRIME64_1;
    for (int lane = 0; lane < LANES; lane += 2) {
        const uint8_t *secret = SECRET + SECRET_OF_MERGE + 8 * lane;
        merged += folded_product(sums[lane] ^ word_at(secret), sums[lane + 1] ^ word_at(secret + 8));
    }
    merged = (merged ^ merged >> 37) * PRIME_MIX;
#ifdef WITH_AVX
    /* Streamed stores become visible in any order. The fence puts them before the header that is written
       next, so that nobody sees a seal on bytes that are still on their way. */
    if (how == STREAMED)
        _mm_sfence();
#endif
    return merged ^ merged >> 32;
}

/* One payload to move, its memory held so that nobody can unmap it meanwhile. */
typedef struct {
    Py_buffer into; /* of NULL where there is nothing but a checksum to make */
    Py_buffer source;
    uint64_t checksum;
} Job;

static void let_go(Job *job)
{
    PyBuffer_Release(&job->into);
    PyBuffer_Release(&job->source);
}

/* Hold what is to be moved. False, with an exception and nothing held, where that cannot be. */
static bool hold(Job *job, PyObject *into, PyObject *source)
{
    job->into.obj = NULL;
    job->into.buf = NULL;
    if (PyObject_GetBuffer(source, &job->source, PyBUF_SIMPLE) < 0)
        return false;
    if (into == NULL)
        return true;
    if (PyObject_GetBuffer(into, &job->into, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&job->source);
        return false;
    }
    const Py_ssize_t length = job->source.len;
    const uintptr_t to = (uintptr_t)job->into.buf, from = (uintptr_t)job->source.buf;
    if (job->into.len != length)
        PyErr_Format(PyExc_ValueError, "into has %zd bytes and source %zd", job->into.len, length);
    else if (length > 0 && to < from + (size_t)length && from < to + (size_t)length)
        PyErr_SetString(PyExc_ValueError, "into and source overlap");
    else
        return true;
    let_go(job);
    return false;
}

static void perform(Job *jobs, Py_ssize_t count, size_t stream_from)
{
    Stripes *const stripes = stripes_used;
    size_t total = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        total += (size_t)jobs[i].source.len;
    PyThreadState *released = total >= RELEASE_FROM ? PyEval_SaveThread() : NULL;
    for (Job *job = jobs; job < jobs + count; job++) {
        uint8_t *into = job->into.buf;
        const size_t length = (size_t)job->source.len;
        enum store how = NOT_AT_ALL;
        if (into != NULL)
            how = length >= stream_from && (uintptr_t)into % STRIPE == 0 ? STREAMED : PLAIN;
        if (length > SHORT_MAX)
            job->checksum = moved(stripes, into, job->source.buf, length, how);
        else if (how != NOT_AT_ALL && length > 0)
            memcpy(into, job->source.buf, length);
    }
    if (released != NULL)
        PyEval_RestoreThread(released);
}

/* The checksum of what was performed, as Python has it. */
static PyObject *checksum_of(const Job *job)
{
    if (job->source.len > SHORT_MAX)
        return PyLong_FromUnsignedLongLong(job->checksum);
    const void *stored = job->into.obj != NULL ? job->into.buf : job->source.buf;
    PyObject *xxhash = PyImport_ImportModule("xxhash");
    if (xxhash == NULL)
        return NULL;
    PyObject *made = PyObject_CallMethod(xxhash, "xxh3_64_intdigest", "y#", stored, job->source.len);
    Py_DECREF(xxhash);
    return made;
}

static PyObject *move_one(PyObject *into, PyObject *source, size_t stream_from)
{
    Job job;
    if (!hold(&job, into, source))
        return NULL;
    perform(&job, 1, stream_from);
    PyObject *made = checksum_of(&job);
    let_go(&job);
    return made;
}

static PyObject *move_pair(PyObject *const *arguments, Py_ssize_t count, size_t stream_from)
{
    if (count == 2)
        return move_one(arguments[0], arguments[1], stream_from);
    PyErr_SetString(PyExc_TypeError, "wanted are two arguments: into and source");
    return NULL;
}

/* All pairs are held, and thereby checked, before the first byte is moved. */
static PyObject *move_pairs(PyObject *given, size_t stream_from)
{
    PyObject *pairs = PySequence_Tuple(given); /* which nobody changes while we hold its buffers */
    if (pairs == NULL)
        return NULL;
    const Py_ssize_t count = PyTuple_GET_SIZE(pairs);
    PyObject *made = NULL;
    Py_ssize_t held = 0;
    Job *jobs = PyMem_New(Job, (size_t)count);
    if (jobs == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; held < count; held++) {
        PyObject *into, *source, *pair = PyTuple_GET_ITEM(pairs, held);
        if (!PyTuple_Check(pair)) {
            PyErr_SetString(PyExc_TypeError, "a pair is a tuple: into and source");
            goto done;
        }
        if (!PyArg_ParseTuple(pair, "OO", &into, &source) || !hold(&jobs[held], into, source))
            goto done;
    }
    perform(jobs, count, stream_from);
    made = PyList_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        PyObject *checksum = checksum_of(&jobs[i]);
        if (checksum == NULL)
            Py_CLEAR(made);
        else
            PyList_SET_ITEM(made, i, checksum);
    }
done:
    while (held > 0)
        let_go(&jobs[--held]);
    PyMem_Free(jobs);
    Py_DECREF(pairs);
    return made;
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

static PyObject *copy_in_batch(PyObject *self, PyObject *pairs)
{
    (void)self;
    return move_pairs(pairs, STREAM_IN_FROM);
}

static PyObject *copy_out_batch(PyObject *self, PyObject *pairs)
{
    (void)self;
    return move_pairs(pairs, STREAM_OUT_FROM);
}

static PyObject *checksum(PyObject *self, PyObject *source)
{
    (void)self;
    return move_one(NULL, source, 0);
}

/* A whole column: what seal.py does in `write`, `verify` and `copy_out`, with the interpreter asked once
   instead of thirty times, which is what small columns spend their time on. The layout of the header is
   explained there; it is little-endian everywhere. */
enum { HEADER = 64, CHECKED = 60, KEY = 16, TOKENS_MAX = 64, VERSION = 1, OPEN = 1, SEALED = 2 };
enum { AT_TOKENS = 6, AT_SEQUENCE = 8, AT_KEY = 16, AT_TAG = 32, AT_CHECKSUM = 48, AT_LENGTH = 56 };
static const uint64_t PAYLOAD_MAX = 1 << 30;

enum miss { NO_MISS = -1, ABSENT, TORN, STALE, FOREIGN, CORRUPT, MISSES };
static PyTypeObject *header_type; /* seal.Header, a tuple of six */
static PyObject *misses[MISSES];  /* seal.Miss, in this order */

typedef struct {
    const uint8_t *key, *tag;
    uint64_t sequence;
    PyObject *key_object, *tag_object;
} Column;

static void put(uint8_t *at, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        at[i] = (uint8_t)(value >> 8 * i);
}

static uint64_t get(const uint8_t *at, int bytes)
{
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++)
        value |= (uint64_t)at[i] << 8 * i;
    return value;
}

/* XXH3-64 of 33 to 64 bytes, as the specification has it: here of the 60 that the check covers. */
static uint32_t check_of(const uint8_t *header)
{
    static const int at[4] = {0, CHECKED - 16, 16, CHECKED - 32};
    uint64_t sum = CHECKED * PRIME64_1;
    for (int i = 0; i < 4; i++) {
        const uint8_t *secret = SECRET + 16 * i;
        const uint64_t low = word_at(header + at[i]) ^ word_at(secret);
        sum += folded_product(low, word_at(header + at[i] + 8) ^ word_at(secret + 8));
    }
    sum = (sum ^ sum >> 37) * PRIME_MIX;
    return (uint32_t)(sum ^ sum >> 32);
}

static bool named(Column *column, PyObject *key, PyObject *tag)
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
static bool column_of(PyObject *given, Column *column)
{
    if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != 3) {
        PyErr_SetString(PyExc_TypeError, "a column is a key, a tag and a sequence");
        return false;
    }
    if (!named(column, PyTuple_GET_ITEM(given, 0), PyTuple_GET_ITEM(given, 1)))
        return false;
    column->sequence = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(given, 2));
    return column->sequence != (uint64_t)-1 || !PyErr_Occurred();
}

/* Move the payload, or only sum it up: `into` may be NULL. False with an exception. */
static bool moved_payload(uint8_t *into, const uint8_t *from, size_t length, size_t stream_from, uint64_t *sum)
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
    Stripes *const stripes = stripes_used;
    PyThreadState *released = length >= RELEASE_FROM ? PyEval_SaveThread() : NULL;
    *sum = moved(stripes, into, from, length, how);
    if (released != NULL)
        PyEval_RestoreThread(released);
    return true;
}

/* Seal a payload into a slot. False with an exception, and then the slot is as it was. */
static bool written(
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
            sealed[5] = SEALED;
            put(sealed + AT_TOKENS, (uint64_t)tokens, 2);
            memcpy(sealed + AT_KEY, column->key, KEY);
            memcpy(sealed + AT_TAG, column->tag, KEY);
            put(sealed + AT_CHECKSUM, sum, 8);
            put(sealed + AT_LENGTH, length, 4);
            put(sealed + CHECKED, check_of(sealed), 4);
            __atomic_thread_fence(__ATOMIC_RELEASE);
            memcpy(slot, sealed, HEADER);
        }
    }
    PyBuffer_Release(&payload);
    return made;
}

static PyObject *write_column(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    Column column;
    Py_buffer slot;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "wanted are four arguments: slot, column, tokens and payload");
        return NULL;
    }
    if (!column_of(arguments[1], &column) || PyObject_GetBuffer(arguments[0], &slot, PyBUF_WRITABLE) < 0)
        return NULL;
    const bool made = written(slot.buf, slot.len, &column, arguments[2], arguments[3]);
    PyBuffer_Release(&slot);
    return made ? Py_NewRef(Py_None) : NULL;
}

/* What 64 bytes say, and whether it is the column that is expected. */
static enum miss identified(const uint8_t *header, const Column *column)
{
    static const uint8_t nothing[HEADER];
    if (memcmp(header, "TIDE", 4) != 0)
        return memcmp(header, nothing, HEADER) == 0 ? ABSENT : CORRUPT;
    if (header[4] == VERSION && header[5] == OPEN)
        return TORN;
    if (header[4] != VERSION || header[5] != SEALED || get(header + CHECKED, 4) != check_of(header))
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

static PyObject *header_of(const uint8_t *header, const Column *column)
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
static PyObject *read_from(const uint8_t *slot, Py_ssize_t room, PyObject *given_column, PyObject *given_into)
{
    Column column;
    Py_buffer into = {.buf = NULL, .obj = NULL};
    if (header_type == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "bind() has not been called");
        return NULL;
    }
    if (room < HEADER) {
        PyErr_SetString(PyExc_ValueError, "a slot has 64 bytes or more");
        return NULL;
    }
    ask_for_first(NULL, slot, (size_t)room);
    if (given_into != NULL && PyObject_GetBuffer(given_into, &into, PyBUF_WRITABLE) < 0)
        return NULL;
    ask_for_first(NULL, into.buf, (size_t)into.len < STRIPE ? (size_t)into.len : STRIPE);
    if (!column_of(given_column, &column)) {
        if (into.obj != NULL)
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
    if (into.obj != NULL)
        PyBuffer_Release(&into);
    return made;
}

static PyObject *read_column(PyObject *given_slot, PyObject *column, PyObject *into)
{
    Py_buffer slot;
    if (PyObject_GetBuffer(given_slot, &slot, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *made = read_from(slot.buf, slot.len, column, into);
    PyBuffer_Release(&slot);
    return made;
}

static PyObject *verify_column(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count == 2)
        return read_column(arguments[0], arguments[1], NULL);
    PyErr_SetString(PyExc_TypeError, "wanted are two arguments: slot and column");
    return NULL;
}

static PyObject *copy_column(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count == 3)
        return read_column(arguments[0], arguments[1], arguments[2]);
    PyErr_SetString(PyExc_TypeError, "wanted are three arguments: slot, column and into");
    return NULL;
}

/* All of an evict or a refill through a mapped arena: what Window in client/window.py does, without the
   interpreter. Whoever holds the lock may change the memory or shut it; who only reads holds the
   interpreter while looking for a slot, and the memory of that slot while copying. */
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
    uint64_t line;
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
    window->line = 0;
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
    const long long line = number_in(arena, "slots"), size = line < 0 ? -1 : number_in(arena, "slot_bytes");
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
    window->line = (uint64_t)line;
    window->slot_bytes = (size_t)size;
    let_go_of(before, parts_before);
    Py_RETURN_NONE;
}

/* Where a slot is, and the part it is in. NULL above the line; NULL with an exception where it cannot be. */
static uint8_t *slot_of(const Window *window, PyObject *given, const Part **part)
{
    int overflow;
    const long long number = PyLong_AsLongLongAndOverflow(given, &overflow);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    if (overflow > 0 || (overflow == 0 && number >= 0 && (uint64_t)number >= window->line))
        return NULL;
    uint64_t index = (uint64_t)number;
    for (*part = window->part; number >= 0 && *part < window->part + window->parts; ++*part) {
        if (index < (*part)->slots)
            return (uint8_t *)(*part)->memory.buf + index * window->slot_bytes;
        index -= (*part)->slots;
    }
    PyErr_Format(PyExc_IndexError, "slot %R of %llu", given, (unsigned long long)window->line);
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
    if (slot != NULL && (!named(&named_column, column[1], column[2]) ||
                         !written(slot, (Py_ssize_t)window->slot_bytes, &named_column, column[3], column[4])))
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
        if (!PyTuple_Check(columns[i]) || PyTuple_GET_SIZE(columns[i]) != 5) {
            PyErr_SetString(PyExc_TypeError, "a column is a slot, a key, a tag, tokens and a payload");
            return NULL;
        }
        if (!put_in(window, &PyTuple_GET_ITEM(columns[i], 0)))
            return NULL;
    }
    return PyLong_FromUnsignedLongLong(window->number);
}

static PyObject *evict(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (count == 5) {
        if (PyMemoryView_Check(arguments[4]))
            ask_for_first(NULL, PyMemoryView_GET_BUFFER(arguments[4])->buf, (size_t)PyMemoryView_GET_BUFFER(arguments[4])->len);
        return put_under_lock((Window *)self, evict_one, arguments, count);
    }
    PyErr_SetString(PyExc_TypeError, "wanted are five arguments: slot, key, tag, tokens and payload");
    return NULL;
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
    if (!PyTuple_Check(wanted) || PyTuple_GET_SIZE(wanted) != 2) {
        PyErr_SetString(PyExc_TypeError, "wanted is a slot and a column");
        return NULL;
    }
    const Part *part;
    const uint8_t *slot = slot_of(window, PyTuple_GET_ITEM(wanted, 0), &part);
    if (slot == NULL)
        return PyErr_Occurred() ? NULL : Py_NewRef(misses[ABSENT]);
    Py_buffer held;
    if (PyObject_GetBuffer(part->memory.obj, &held, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *made = read_from(slot, (Py_ssize_t)window->slot_bytes, PyTuple_GET_ITEM(wanted, 1), into);
    PyBuffer_Release(&held);
    return made;
}

static PyObject *refill(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    Window *window = (Window *)self;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "wanted are two arguments: wanted and into");
        return NULL;
    }
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
        if (found == NULL)
            Py_CLEAR(made);
        else
            PyList_SET_ITEM(made, i, found);
    }
done:
    Py_XDECREF(wanted);
    Py_XDECREF(into);
    return made;
}

/* Whole files, several at a time: what tier2/files.py does, one system call after the other, without the
   interpreter in between. A direct file gives and takes whole pages, so what is left after a short write
   or read begins with a page. */
enum { PARTS_MAX = 8 };

typedef struct {
    PyObject *given_path, *path; /* as it was given, and in bytes */
    Py_buffer part[PARTS_MAX];
    int parts, fd, failed; /* by which errno, or 0 */
    size_t bytes, done;
} File;

static void let_go_of_files(File *files, Py_ssize_t count, Py_buffer *bounce)
{
    for (File *file = files; file < files + count; file++) {
        while (file->parts > 0)
            PyBuffer_Release(&file->part[--file->parts]);
        Py_XDECREF(file->path);
        Py_XDECREF(file->given_path);
    }
    PyMem_Free(files);
    if (bounce->obj != NULL)
        PyBuffer_Release(bounce);
}

static bool hold_file(File *file, PyObject *given, int how)
{
    PyObject *path, *given_parts;
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "OO", &path, &given_parts)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a file is a tuple: path and parts");
        return false;
    }
    file->given_path = Py_NewRef(path);
    PyObject *parts = PyUnicode_FSConverter(path, &file->path) ? PySequence_Tuple(given_parts) : NULL;
    if (parts == NULL)
        return false;
    const Py_ssize_t count = PyTuple_GET_SIZE(parts);
    if (count > PARTS_MAX)
        PyErr_Format(PyExc_ValueError, "a file has up to %d parts, not %zd", PARTS_MAX, count);
    while (!PyErr_Occurred() && file->parts < count)
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(parts, file->parts), &file->part[file->parts], how) == 0)
            file->bytes += (size_t)file->part[file->parts++].len;
    Py_DECREF(parts);
    return !PyErr_Occurred();
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
    *bounce = (Py_buffer){.obj = NULL};
    if (files == NULL)
        PyErr_NoMemory();
    else if (given_bounce == Py_None || PyObject_GetBuffer(given_bounce, bounce, PyBUF_WRITABLE) == 0)
        while (held < *count && hold_file(&files[held], PyTuple_GET_ITEM(list, held), how))
            held++;
    if (bounce->obj != NULL && bounce->len == 0)
        PyErr_SetString(PyExc_ValueError, "nothing can go through a bounce of no bytes");
    if (files != NULL && PyErr_Occurred()) {
        let_go_of_files(files, *count, bounce);
        files = NULL;
    }
    Py_DECREF(list);
    return files;
}

static PyObject *error_of(int number, PyObject *path)
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
        if (answer == NULL)
            Py_CLEAR(made);
        else
            PyList_SET_ITEM(made, i, answer);
    }
    return made;
}

/* Where the bytes of a file from what is done on lie, at most `room` of them. */
static int rest_of(const File *file, size_t room, struct iovec *rest)
{
    int count = 0;
    size_t skipped = file->done;
    for (int i = 0; i < file->parts && room > 0; i++) {
        const size_t length = (size_t)file->part[i].len;
        const size_t bytes = length <= skipped ? 0 : length - skipped < room ? length - skipped : room;
        if (bytes > 0)
            rest[count++] = (struct iovec){(uint8_t *)file->part[i].buf + skipped, bytes};
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

/* Whether it could be opened. */
static bool opened(File *file, int flags)
{
    do
        file->fd = open(PyBytes_AS_STRING(file->path), flags, 0600);
    while (file->fd < 0 && errno == EINTR);
    file->failed = file->fd < 0 ? errno : 0;
    return file->fd >= 0;
}

static void stage_one(File *file, int flags, bool locked, const Py_buffer *bounce)
{
    if (!opened(file, flags))
        return;
    if (locked && flock(file->fd, LOCK_EX | LOCK_NB) < 0)
        file->failed = errno;
    /* Before it was locked it looked like a dead writer's: it may have been swept. */
    struct stat status;
    if (locked && !file->failed && fstat(file->fd, &status) == 0 && status.st_nlink == 0)
        file->failed = ENOENT;
    while (!file->failed && file->done < file->bytes) {
        const ssize_t some = write_some(file, bounce);
        if (some >= 0)
            file->done += (size_t)some;
        else if (errno != EINTR)
            file->failed = errno;
    }
    if (file->failed) {
        unlink(PyBytes_AS_STRING(file->path));
        close(file->fd);
    }
    file->done = (size_t)file->fd;
}

static void fetch_one(File *file, int flags, const Py_buffer *bounce)
{
    ssize_t some = PAGE;
    if (!opened(file, flags))
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

static PyObject *publish_files(PyObject *self, PyObject *given)
{
    (void)self;
    PyObject *staged = PySequence_Tuple(given), *made = NULL;
    if (staged == NULL)
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
    for (Py_ssize_t i = 0; i < count; i++) {
        if (rename(jobs[i].from, jobs[i].to) < 0) {
            jobs[i].failed = errno;
            unlink(jobs[i].from);
        }
        close(jobs[i].fd);
    }
    PyEval_RestoreThread(released);
    made = PyList_New(count);
    for (Py_ssize_t i = 0; made != NULL && i < count; i++) {
        PyObject *path = PyTuple_GET_ITEM(PyTuple_GET_ITEM(staged, i), 1);
        PyObject *answer = jobs[i].failed ? error_of(jobs[i].failed, path) : Py_NewRef(Py_None);
        if (answer == NULL)
            Py_CLEAR(made);
        else
            PyList_SET_ITEM(made, i, answer);
    }
done:
    PyMem_Free(jobs);
    Py_DECREF(staged);
    return made;
}

static PyObject *bind(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 1 + MISSES || !PyType_Check(arguments[0]) ||
        !PyType_IsSubtype((PyTypeObject *)arguments[0], &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "wanted are the type of a header and five misses");
        return NULL;
    }
    Py_XSETREF(header_type, (PyTypeObject *)Py_NewRef(arguments[0]));
    for (int i = 0; i < MISSES; i++)
        Py_XSETREF(misses[i], Py_NewRef(arguments[1 + i]));
    Py_RETURN_NONE;
}

static PyObject *names_of_levels(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    PyObject *names = PyTuple_New(levels_found);
    for (int i = 0; names != NULL && i < levels_found; i++) {
        PyObject *name = PyUnicode_FromString(levels[i].name);
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
    for (int i = 0; i < levels_found; i++) {
        if (strcmp(levels[i].name, name) == 0) {
            stripes_used = levels[i].stripes;
            Py_RETURN_NONE;
        }
    }
    return PyErr_Format(PyExc_ValueError, "this machine has no level %s", name);
}

#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL

static PyMethodDef methods[] = {
    {"copy_in", FAST(copy_in), "Copy a payload into its slot; its checksum."},
    {"copy_out", FAST(copy_out), "Copy a payload out of its slot; the checksum of what has arrived."},
    {"copy_in_batch", copy_in_batch, METH_O, "copy_in(into, source) for each pair, or for none."},
    {"copy_out_batch", copy_out_batch, METH_O, "copy_out(into, source) for each pair, or for none."},
    {"checksum", checksum, METH_O, "The checksum of what lies there."},
    {"write_column", FAST(write_column), "seal.write(slot, column, tokens, payload)"},
    {"verify_column", FAST(verify_column), "seal.verify(slot, column)"},
    {"copy_column", FAST(copy_column), "seal.copy_out(slot, column, into)"},
    {"stage_files", stage_files, METH_VARARGS, "files.stage(files, flags, locked, bounce)"},
    {"publish_files", publish_files, METH_O, "files.publish(staged)"},
    {"fetch_files", fetch_files, METH_VARARGS, "files.fetch(files, flags, bounce)"},
    {"_bind", FAST(bind), "What is answered with: seal.Header, and ABSENT, TORN, STALE, FOREIGN, CORRUPT."},
    {"levels", names_of_levels, METH_NOARGS, "The kinds of code that this machine can run, best first."},
    {"_use", use, METH_O, "Go on at this level, in the whole process. For tests."},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef window_methods[] = {
    {"follow", follow, METH_O, "The line and the memory are those of this arena now."},
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

static int execute(PyObject *module)
{
    find_levels();
    Py_XSETREF(name_of_acquire, PyUnicode_InternFromString("acquire"));
    Py_XSETREF(name_of_release, PyUnicode_InternFromString("release"));
    PyObject *type = PyType_FromSpec(&window_type);
    const bool failed = type == NULL || name_of_acquire == NULL || name_of_release == NULL ||
                        PyModule_AddType(module, (PyTypeObject *)type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : PyModule_AddStringConstant(module, "name", "native");
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kvss_agent._native",
    .m_doc = "The mover in compiled code; kvss_agent/native.py builds and loads it.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
