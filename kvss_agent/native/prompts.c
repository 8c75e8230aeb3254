/* The loops of a driver over the tokens and the columns of a prompt: swdriver_shim/loops.py says what each one
   does, and has all of them in Python.

   Justified by match.32k.* of `make bench NAME=driver`, with and without ".python". */

#include "native.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(TIDEGATE_PORTABLE)
#define WITH_SHA
#include <cpuid.h>
#include <immintrin.h>
#endif

enum { SHA_BLOCK = 64, STATE = 32, COUNT = 4, KEY = 16, PIECE_MAX = 1 << 18, AHEAD = 32, FIELDS_MAX = 32, PART_BYTE = 2 };

/* SHA-256, after FIPS 180-4, for processors that have instructions for it: hashlib is faster than anything
   that others could run. */

#ifdef WITH_SHA
static const uint32_t ROUND[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};
static const uint32_t FIRST[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

/* The instructions want the eight words of the state as two halves, ABEF and CDGH, highest first. */
typedef struct {
    __m128i abef, cdgh;
} Sha;

__attribute__((target("sha,sse4.1"))) static inline Sha sha_of(const uint32_t words[8])
{
    const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)words), 0xB1);
    const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(words + 4)), 0x1B);
    return (Sha){_mm_alignr_epi8(cdab, efgh, 8), _mm_blend_epi16(efgh, cdab, 0xF0)};
}

/* Takes a block of each lane into its sum. Each round waits for the one before it: two lanes take as long as one. */
__attribute__((target("sha,sse4.1"))) static inline void compress(Sha *sums, const uint8_t *const *from, const int lanes)
{
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i words[2][4];
    Sha now[2];
    for (int lane = 0; lane < lanes; lane++) {
        now[lane] = sums[lane];
        for (int i = 0; i < 4; i++)
            words[lane][i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)from[lane] + i), big_endian);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) { /* four rounds each */
#pragma GCC unroll 2
        for (int lane = 0; lane < lanes; lane++) {
            __m128i *const its = words[lane];
            const __m128i these = its[i % 4], next = its[(i + 1) % 4], last = its[(i + 3) % 4];
            const __m128i added = _mm_add_epi32(these, _mm_load_si128((const __m128i *)ROUND + i));
            now[lane].cdgh = _mm_sha256rnds2_epu32(now[lane].cdgh, now[lane].abef, added);
            now[lane].abef =
                _mm_sha256rnds2_epu32(now[lane].abef, now[lane].cdgh, _mm_shuffle_epi32(added, 0x0E));
            if (i < 12) {
                const __m128i seven_before = _mm_alignr_epi8(last, its[(i + 2) % 4], 4);
                its[i % 4] = _mm_sha256msg2_epu32(
                    _mm_add_epi32(_mm_sha256msg1_epu32(these, next), seven_before), last);
            }
        }
    }
    for (int lane = 0; lane < lanes; lane++) {
        sums[lane].abef = _mm_add_epi32(now[lane].abef, sums[lane].abef);
        sums[lane].cdgh = _mm_add_epi32(now[lane].cdgh, sums[lane].cdgh);
    }
}

__attribute__((target("sha,sse4.1"))) static inline void put_digest(uint8_t *into, Sha sha)
{
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const __m128i feba = _mm_shuffle_epi32(sha.abef, 0x1B), dchg = _mm_shuffle_epi32(sha.cdgh, 0xB1);
    const __m128i abcd = _mm_blend_epi16(feba, dchg, 0xF0), efgh = _mm_alignr_epi8(dchg, feba, 8);
    _mm_storeu_si128((__m128i *)into, _mm_shuffle_epi8(abcd, big_endian));
    _mm_storeu_si128((__m128i *)into + 1, _mm_shuffle_epi8(efgh, big_endian));
}

/* The digest of each message: the key, `blocks` blocks of tokens, and a last block with the digest before. `last` is
   that one, of the first message. Only last blocks wait for each other, so tokens are two messages ahead of them. */
__attribute__((target("sha,sse4.1"))) static bool chain(
    const uint8_t *key, uint8_t *last, const uint8_t *tokens, Py_ssize_t count, size_t blocks, char *states,
    PyObject *keys)
{
    Sha keyed = sha_of(FIRST), ends[2];
    compress(&keyed, &key, 1);
    int waiting = 0; /* messages whose tokens are in `ends` */
    for (Py_ssize_t at = 0; at < count || waiting; at += 2) {
        const int coming = at + 2 <= count ? 2 : at < count ? 1 : 0;
        Sha sums[2] = {keyed, keyed};
        const uint8_t *from[2] = {tokens, tokens + blocks * SHA_BLOCK};
        tokens += 2 * blocks * SHA_BLOCK;
        for (int one = 0; one < 2; one++) {
            Sha both[2] = {ends[one], sums[one]};
            const uint8_t *const these[2] = {last, from[one]};
            if (one < waiting && one < coming)
                compress(both, these, 2);
            else if (one < waiting)
                compress(both, these, 1);
            else if (one < coming)
                compress(both + 1, these + 1, 1);
            sums[one] = both[1];
            from[one] += SHA_BLOCK;
            if (one < waiting) {
                const Py_ssize_t number = at - 2 + one;
                put_digest(last, both[0]);
                memcpy(states + number * STATE, last, STATE);
                PyObject *its_key = PyBytes_FromStringAndSize((const char *)last, KEY);
                if (its_key == NULL)
                    return false;
                PyList_SET_ITEM(keys, number, its_key);
            }
        }
        for (size_t block = 1; block < blocks; block++, from[0] += SHA_BLOCK, from[1] += SHA_BLOCK)
            if (coming == 2)
                compress(sums, from, 2);
            else if (coming == 1)
                compress(sums, from, 1);
        ends[0] = sums[0], ends[1] = sums[1];
        waiting = coming;
    }
    return true;
}

static bool has_sha(void)
{
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & 1u << 29) && __get_cpuid(1, &a, &b, &c, &d) &&
           (c & bit_SSE4_1) && (c & bit_SSSE3);
}
#else
static bool chain(
    const uint8_t *key, uint8_t *last, const uint8_t *tokens, Py_ssize_t count, size_t blocks, char *states,
    PyObject *keys)
{
    (void)key, (void)last, (void)tokens, (void)count, (void)blocks, (void)states, (void)keys;
    return false;
}

static bool has_sha(void)
{
    return false;
}
#endif

static inline void put_little_endian(uint8_t *into, uint32_t value)
{
    for (int byte = 0; byte < 4; byte++)
        into[byte] = (uint8_t)(value >> 8 * byte);
}

static PyObject *chained(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    Py_buffer key = {.obj = NULL}, first = {.obj = NULL}, pieces = {.obj = NULL};
    PyObject *states = NULL, *keys = NULL, *made = NULL;
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "wanted are four arguments: key, first, tokens and how many are a unit");
    const Py_ssize_t tokens = PyLong_AsSsize_t(arguments[3]);
    if (tokens == -1 && PyErr_Occurred())
        return NULL;
    if (PyObject_GetBuffer(arguments[0], &key, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(arguments[1], &first, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(arguments[2], &pieces, PyBUF_SIMPLE) < 0)
        goto done;
    const size_t unit = (size_t)tokens * 4, blocks = unit / SHA_BLOCK;
    if (key.len != SHA_BLOCK || first.len != STATE || tokens < 1 || tokens > PIECE_MAX / 4 || unit % SHA_BLOCK) {
        PyErr_SetString(
            PyExc_ValueError, "a key has 64 bytes, a state 32, and a unit a multiple of 16 tokens, at most 65536");
        goto done;
    }
    uint8_t last[SHA_BLOCK] = {0};
    const uint64_t bits = (SHA_BLOCK + unit + STATE + COUNT) * 8;
    memcpy(last, first.buf, STATE);
    put_little_endian(last + STATE, (uint32_t)tokens);
    last[STATE + COUNT] = 0x80;
    for (int i = 0; i < 8; i++)
        last[SHA_BLOCK - 1 - i] = (uint8_t)(bits >> 8 * i);
    const Py_ssize_t units = pieces.len / (Py_ssize_t)unit;
    if ((states = PyBytes_FromStringAndSize(NULL, units * STATE)) == NULL || (keys = PyList_New(units)) == NULL)
        goto done;
    if (chain(key.buf, last, pieces.buf, units, blocks, PyBytes_AS_STRING(states), keys))
        made = PyTuple_Pack(2, states, keys);
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_NotImplementedError, "this machine has no instructions for SHA-256");
done:
    Py_XDECREF(states);
    Py_XDECREF(keys);
    PyBuffer_Release(&key);
    PyBuffer_Release(&first);
    PyBuffer_Release(&pieces);
    return made;
}

/* Packs ints of one digit from this place on, as nearly all tokens are, and returns how many there were in a row. No
   code of others runs, and nothing is written to the numbers: to count references to so many takes as long as to
   read them. */
static Py_ssize_t packed_short(uint8_t *into, PyObject *numbers, Py_ssize_t first, Py_ssize_t end)
{
    Py_ssize_t done = 0;
#if PY_VERSION_HEX < 0x030C0000
    PyObject **from = PySequence_Fast_ITEMS(numbers) + first;
    if (end > PySequence_Fast_GET_SIZE(numbers))
        end = PySequence_Fast_GET_SIZE(numbers);
    const Py_ssize_t most = end - first;
    for (; done < most && PyLong_CheckExact(from[done]) && Py_SIZE(from[done]) == 1; done++) {
        if (done + AHEAD < most)
            PREFETCH(from[done + AHEAD]);
        put_little_endian(into + 4 * done, ((PyLongObject *)from[done])->ob_digit[0]);
    }
#endif
    (void)into, (void)numbers, (void)first, (void)end;
    return done;
}

/* A token, and whether it is one; else with an exception. */
static bool token_of(PyObject *number, uint32_t *token)
{
    unsigned long value;
    if (PyLong_CheckExact(number))
        value = PyLong_AsUnsignedLong(number);
    else { /* which may run code of others */
        PyObject *whole = PyNumber_Index(number);
        if (whole == NULL)
            return false;
        value = PyLong_AsUnsignedLong(whole);
        Py_DECREF(whole);
    }
    if (value > UINT32_MAX && !PyErr_Occurred())
        PyErr_Format(PyExc_OverflowError, "%lu is too large", value);
    *token = (uint32_t)value;
    return value < UINT32_MAX || !PyErr_Occurred();
}

static PyObject *packed(PyObject *self, PyObject *given)
{
    (void)self;
    if (PyUnicode_Check(given))
        return PyErr_Format(PyExc_TypeError, "they are no sequence of numbers");
    PyObject *numbers = PySequence_Fast(given, "they are no sequence of numbers");
    if (numbers == NULL)
        return NULL;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(numbers);
    PyObject *made = PyBytes_FromStringAndSize(NULL, count * 4);
    bool good = made != NULL;
    for (Py_ssize_t i = 0; good && i < count; i++) {
        uint8_t *into = (uint8_t *)PyBytes_AS_STRING(made);
        i += packed_short(into + 4 * i, numbers, i, count);
        if (i == count)
            break;
        if (i >= PySequence_Fast_GET_SIZE(numbers)) {
            PyErr_SetString(PyExc_TypeError, "they became fewer meanwhile");
            good = false;
            break;
        }
        PyObject *number = Py_NewRef(PySequence_Fast_GET_ITEM(numbers, i));
        uint32_t token;
        if ((good = token_of(number, &token)))
            put_little_endian(into + 4 * i, token);
        Py_DECREF(number);
    }
    Py_DECREF(numbers);
    if (!good)
        Py_CLEAR(made);
    return made;
}

/* Columns: objects with slots, which are read where they lie. */

/* Where objects of a class have a field: an object, or a number that is none (fields.c). */
typedef struct {
    Py_ssize_t offset;
    bool is_number;
} Place;

typedef struct {
    PyTypeObject *type;
    Py_ssize_t state, stored_at, used_at, terms;
    Place uses;
} Fields;

/* Names of fields. They are interned, as constants in Python are: then a class finds them in the cache of look-ups,
   which takes a fifth of the time. */
static struct {
    PyObject *state, *stored_at, *used_at, *terms, *uses, *parent, *key, *depth, *ref_count, *ttl, *expires_at;
} named;

/* False with an exception if objects of this class have no such field. */
static bool found_place(PyTypeObject *type, PyObject *name, Place *place)
{
    if (!Py_IS_TYPE(type, &PyType_Type)) { /* whose look-up runs no code of others, unless it finds no slot */
        PyErr_Format(PyExc_TypeError, "%s is no plain class", type->tp_name);
        return false;
    }
    Py_INCREF(type); /* that code may drop the column, which is borrowed */
    PyObject *member = PyObject_GetAttr((PyObject *)type, name);
    const PyMemberDef *found = NULL;
    if (member != NULL && Py_IS_TYPE(member, &PyMemberDescr_Type) && PyType_IsSubtype(type, PyDescr_TYPE(member)))
        found = ((PyMemberDescrObject *)member)->d_member;
    const bool is_field = found != NULL && (found->type == T_OBJECT_EX || found->type == T_INT);
    if (is_field)
        *place = (Place){found->offset, found->type == T_INT};
    else if (member != NULL)
        PyErr_Format(PyExc_TypeError, "%U of %s is no slot", name, type->tp_name);
    Py_XDECREF(member);
    Py_DECREF(type);
    return is_field;
}

/* Where they have an object; -1 with an exception. */
static Py_ssize_t offset_of(PyTypeObject *type, PyObject *name)
{
    Place place;
    if (!found_place(type, name, &place))
        return -1;
    if (!place.is_number)
        return place.offset;
    PyErr_Format(PyExc_TypeError, "%U of %s is a number", name, type->tp_name);
    return -1;
}

/* Where this column has its fields; false with an exception if it is none. */
static bool found_fields(Fields *fields, PyObject *column)
{
    PyTypeObject *type = Py_TYPE(column);
    if (fields->type == type)
        return true;
    const struct {
        PyObject *name;
        Py_ssize_t *offset;
    } wanted[] = {
        {named.state, &fields->state},
        {named.stored_at, &fields->stored_at},
        {named.used_at, &fields->used_at},
        {named.terms, &fields->terms},
    };
    if (!found_place(type, named.uses, &fields->uses))
        return false;
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        if ((*wanted[i].offset = offset_of(type, wanted[i].name)) < 0)
            return false;
    fields->type = type;
    return true;
}

static PyObject **field(PyObject *column, Py_ssize_t offset)
{
    return (PyObject **)((char *)column + offset);
}

static int *number_in(PyObject *column, Py_ssize_t offset)
{
    return (int *)((char *)column + offset);
}

static bool is_list(PyObject *given)
{
    if (PyList_Check(given))
        return true;
    PyErr_SetString(PyExc_TypeError, "wanted is a list");
    return false;
}

/* A list as long as this one, whose size is looked at again: making one may run code of others, which collects
   garbage. */
static PyObject *as_long_as(PyObject *list)
{
    const Py_ssize_t size = PyList_GET_SIZE(list);
    PyObject *made = PyList_New(size);
    if (made != NULL && PyList_GET_SIZE(list) != size) {
        PyErr_SetString(PyExc_RuntimeError, "the list changed meanwhile");
        Py_CLEAR(made);
    }
    return made;
}

/* The part that has a key, if any has it: borrowed; NULL, without an exception, for what is no key or no part. */
static PyObject *part_with(PyObject *parts, PyObject *key)
{
    const Py_ssize_t count = PyList_GET_SIZE(parts);
    if (count == 0 || !PyBytes_CheckExact(key) || PyBytes_GET_SIZE(key) <= PART_BYTE)
        return NULL; /* bytes run no code of others where they are compared */
    PyObject *part = PyList_GET_ITEM(parts, (uint8_t)PyBytes_AS_STRING(key)[PART_BYTE] % count);
    return PyDict_Check(part) ? part : NULL;
}

/* The same with an exception. */
static PyObject *part_of(PyObject *parts, PyObject *key)
{
    PyObject *part = part_with(parts, key);
    if (part == NULL)
        PyErr_SetString(PyExc_TypeError, "a key is of three bytes or more, and parts are dicts, one or more");
    return part;
}

/* The column of this key, or None: borrowed; NULL with an exception. */
static PyObject *column_at(PyObject *parts, PyObject *key)
{
    PyObject *part = part_of(parts, key), *column = part == NULL ? NULL : PyDict_GetItemWithError(part, key);
    return column == NULL && !PyErr_Occurred() ? Py_None : column;
}

/* Begins to load what a look-up of each of these keys reads: of a table of many columns nothing is in the processor's
   cache, and one key that is not there waits for memory twice. All of them wait at once. That dicts have their indices
   behind a head, which says how many there are, is so in this version of Python; elsewhere it would load in vain. */
#if PY_VERSION_HEX < 0x030C0000
typedef struct {
    Py_ssize_t references;
    uint8_t log2_size, log2_bytes;
} Head;

static const Head *head_of(PyObject *dict)
{
    return (const Head *)((PyDictObject *)dict)->ma_keys;
}

/* The key is bytes, to hash which runs no code of others. */
static void prefetch_index(const Head *head, PyObject *key)
{
    enum { HEAD = 32 };
    const size_t hash = (size_t)PyObject_Hash(key), mask = ((size_t)1 << head->log2_size) - 1;
    PREFETCH((const char *)head + HEAD + ((hash & mask) << (head->log2_bytes - head->log2_size)));
}
#endif

static void prefetch_keys(PyObject *parts, PyObject *keys, Py_ssize_t first, Py_ssize_t end)
{
#if PY_VERSION_HEX < 0x030C0000
    const Head *heads[AHEAD];
    for (Py_ssize_t i = first; i < end; i++) {
        PyObject *part = part_with(parts, PyList_GET_ITEM(keys, i));
        if (part == NULL)
            return; /* who looks the key up raises */
        heads[i - first] = head_of(part);
        PREFETCH(heads[i - first]);
    }
    for (Py_ssize_t i = first; i < end; i++)
        prefetch_index(heads[i - first], PyList_GET_ITEM(keys, i));
#endif
    (void)parts, (void)keys, (void)first, (void)end;
}

/* Prefetches keys from this place on, where each of the next ones is about to be looked up, put or dropped. */
static void prefetch_from(PyObject *parts, PyObject *keys, Py_ssize_t i)
{
    const Py_ssize_t size = PyList_GET_SIZE(keys);
    if (i % AHEAD == 0 && i + 1 < size)
        prefetch_keys(parts, keys, i, i + AHEAD < size ? i + AHEAD : size);
}

/* Where columns have what links them. */
typedef struct {
    PyTypeObject *type;
    Py_ssize_t state, parent, key;
    Place depth;
} Links;

static bool found_links(Links *links, PyObject *column)
{
    PyTypeObject *type = Py_TYPE(column);
    if (links->type == type)
        return true;
    if ((links->state = offset_of(type, named.state)) < 0 || (links->parent = offset_of(type, named.parent)) < 0 ||
        (links->key = offset_of(type, named.key)) < 0 || !found_place(type, named.depth, &links->depth))
        return false;
    links->type = type;
    return true;
}

static bool is_same_key(PyObject *one, PyObject *other)
{
    return one != NULL && PyBytes_CheckExact(one) && PyBytes_CheckExact(other) &&
           PyBytes_GET_SIZE(one) == PyBytes_GET_SIZE(other) &&
           memcmp(PyBytes_AS_STRING(one), PyBytes_AS_STRING(other), (size_t)PyBytes_GET_SIZE(one)) == 0;
}

/* The column before this one, if it has this key and is ready, which nobody has to look up: borrowed. Else None;
   NULL with an exception. */
static PyObject *column_before(Links *links, PyObject *column, PyObject *key, PyObject *ready)
{
    if (column == Py_None)
        return Py_None;
    PyObject *before = found_links(links, column) ? *field(column, links->parent) : NULL;
    if (before == NULL || before == Py_None)
        return PyErr_Occurred() ? NULL : Py_None;
    if (!found_links(links, before))
        return NULL;
    return *field(before, links->state) == ready && is_same_key(*field(before, links->key), key) ? before : Py_None;
}

/* Whether a column is behind this one, in its place: -1 with an exception. */
static int is_behind(Links *links, PyObject *column, PyObject *before, Py_ssize_t place, bool linked)
{
    if (column == Py_None)
        return false;
    if (!found_links(links, column))
        return -1;
    if (linked)
        return *field(column, links->parent) == before;
    if (links->depth.is_number)
        return *number_in(column, links->depth.offset) == place;
    PyObject *depth = *field(column, links->depth.offset);
    if (depth == NULL || !PyLong_CheckExact(depth)) {
        PyErr_SetString(PyExc_TypeError, "a depth is an int");
        return -1;
    }
    const Py_ssize_t its = PyLong_AsSsize_t(depth);
    return its == -1 && PyErr_Occurred() ? -1 : its == place;
}

static PyObject *find(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 6 || !PyList_Check(arguments[0]) || !PyList_Check(arguments[1]) || !is_list(arguments[2]))
        return PyErr_Format(
            PyExc_TypeError,
            "wanted are lists of parts, keys and known columns, how many are ready, the state READY and linked");
    PyObject *parts = arguments[0], *keys = arguments[1], *known = arguments[2], *ready = arguments[4];
    const Py_ssize_t still_ready = PyLong_AsSsize_t(arguments[3]);
    const int linked = still_ready == -1 && PyErr_Occurred() ? -1 : PyObject_IsTrue(arguments[5]);
    if (linked < 0)
        return NULL;
    const Py_ssize_t most = PyList_GET_SIZE(known) < PyList_GET_SIZE(keys) ? PyList_GET_SIZE(known) : PyList_GET_SIZE(keys);
    Py_ssize_t good = still_ready < 0 ? 0 : still_ready < most ? still_ready : most; /* where the prompt has them */
    const Py_ssize_t first = good, size = PyList_GET_SIZE(keys) - first;
    PyObject *found = PyList_New(size); /* for the other keys; making it may run code of others, which collects garbage */
    if (found != NULL && (PyList_GET_SIZE(keys) != first + size || PyList_GET_SIZE(known) < first)) {
        PyErr_SetString(PyExc_RuntimeError, "the lists changed meanwhile");
        Py_CLEAR(found);
    }
    if (found == NULL)
        return NULL;
    Links links = {.type = NULL};
    for (Py_ssize_t i = size; i > 0;) {
        PyObject *key = PyList_GET_ITEM(keys, first + --i);
        PyObject *column = Py_None, *behind = i + 1 < size ? PyList_GET_ITEM(found, i + 1) : Py_None;
        if (behind == Py_None && (size - 1 - i) % AHEAD == 0)
            prefetch_keys(parts, keys, first + (i + 1 < AHEAD ? 0 : i + 1 - AHEAD), first + i + 1);
        if (linked)
            column = column_before(&links, behind, key, ready);
        if (column == Py_None)
            column = column_at(parts, key);
        if (column == NULL)
            goto failed;
        PyList_SET_ITEM(found, i, Py_NewRef(column));
    }
    PyObject *before = first > 0 ? PyList_GET_ITEM(known, first - 1) : Py_None;
    for (; good < first + size; before = PyList_GET_ITEM(found, good++ - first)) {
        const int behind = is_behind(&links, PyList_GET_ITEM(found, good - first), before, good, linked);
        if (behind < 0)
            goto failed;
        if (!behind)
            break;
    }
    const int put = PyList_SetSlice(known, first, PyList_GET_SIZE(known), found);
    Py_DECREF(found);
    return put < 0 ? NULL : PyLong_FromSsize_t(good);
failed:
    Py_DECREF(found);
    return NULL;
}

/* A time that others have to be after. Columns of one prompt have the same object for their time, so the answer
   for the last one is remembered with it, for as long as nothing else runs. */
typedef struct {
    double time;
    PyObject *last;
    bool last_is_after;
} Since;

/* Whether a column's time is after this one: -1 with an exception. */
static inline int is_after(Since *since, PyObject *given)
{
    if (given == since->last && given != NULL)
        return since->last_is_after;
    if (given == NULL) {
        PyErr_SetString(PyExc_AttributeError, "a column without its time");
        return -1;
    }
    if (!PyFloat_CheckExact(given) && !PyLong_CheckExact(given)) { /* others run code of their own */
        PyErr_SetString(PyExc_TypeError, "a time is a float or an int");
        return -1;
    }
    const double at = PyFloat_AsDouble(given);
    if (at == -1.0 && PyErr_Occurred())
        return -1;
    since->last = given;
    return since->last_is_after = at > since->time;
}

static PyObject *type_of_array;

static int is_expired(PyObject *column, double now)
{
    PyObject *at = PyObject_GetAttr(column, named.expires_at);
    Since since = {now, NULL, false};
    const int later = at == NULL ? -1 : is_after(&since, at);
    Py_XDECREF(at);
    return later < 0 ? -1 : !later;
}

/* Terms of which columns have no TTL of their own, as nearly all have: the last ones, for as long as nothing else
   runs. */
typedef struct {
    PyTypeObject *type;
    Py_ssize_t ttl;
    PyObject *last;
} Untimed;

/* Whether a column on these terms has no TTL of its own: -1 with an exception. */
static inline int is_untimed(Untimed *untimed, PyObject *terms)
{
    if (terms == untimed->last && terms != NULL)
        return true;
    if (terms == NULL) {
        PyErr_SetString(PyExc_AttributeError, "a column without its terms");
        return -1;
    }
    if (untimed->type != Py_TYPE(terms)) {
        if ((untimed->ttl = offset_of(Py_TYPE(terms), named.ttl)) < 0)
            return -1;
        untimed->type = Py_TYPE(terms);
    }
    if (*field(terms, untimed->ttl) != Py_None)
        return false;
    untimed->last = terms;
    return true;
}

static PyObject *fresh(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    Fields fields = {.type = NULL};
    if (count != 6 || !is_list(arguments[0]))
        return PyErr_Format(PyExc_TypeError, "wanted are a list of columns, a place, the state READY and three times");
    const Py_ssize_t start = PyLong_AsSsize_t(arguments[1]);
    PyObject *ready = arguments[2];
    Since born = {PyFloat_AsDouble(arguments[3]), NULL, false};
    Since seen = {PyFloat_AsDouble(arguments[4]), NULL, false};
    Untimed untimed = {NULL, 0, NULL};
    const double now = PyFloat_AsDouble(arguments[5]);
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t i = start < 0 ? 0 : start;
    for (; i < PyList_GET_SIZE(arguments[0]); i++) {
        PyObject *column = PyList_GET_ITEM(arguments[0], i);
        if (column == Py_None)
            break;
        if (!found_fields(&fields, column))
            return NULL;
        if (*field(column, fields.state) != ready)
            break;
        const int stored = is_after(&born, *field(column, fields.stored_at));
        const int used = stored > 0 ? is_after(&seen, *field(column, fields.used_at)) : stored;
        if (used < 0)
            return NULL;
        if (!used)
            break;
        const int plain = is_untimed(&untimed, *field(column, fields.terms));
        if (plain < 0)
            return NULL;
        if (plain)
            continue;
        Py_INCREF(column);
        const int expired = is_expired(column, now);
        Py_DECREF(column);
        born.last = seen.last = untimed.last = NULL; /* code of others has run */
        fields.type = untimed.type = NULL;
        if (expired < 0)
            return NULL;
        if (expired)
            break;
    }
    return PyLong_FromSsize_t(i > start ? i - start : 0);
}

/* A field, and its place in columns of one class in a row. The class is held: code of others may run between two
   of them. */
typedef struct {
    PyObject *name;
    PyTypeObject *type;
    Place place;
    bool is_field;
} Slot;

/* Whether this column has the field, and its place is known now; else with an exception. */
static inline bool is_in(Slot *slot, PyObject *column)
{
    if (Py_TYPE(column) != slot->type) {
        Py_XSETREF(slot->type, (PyTypeObject *)Py_NewRef(Py_TYPE(column)));
        slot->is_field = found_place(slot->type, slot->name, &slot->place);
    }
    return slot->is_field;
}

/* What this column has there; NULL with an exception. */
static inline PyObject *value_of(Slot *slot, PyObject *column)
{
    if (!is_in(slot, column))
        return NULL;
    if (slot->place.is_number)
        return PyLong_FromLong(*number_in(column, slot->place.offset));
    PyObject *value = *field(column, slot->place.offset);
    if (value == NULL)
        PyErr_SetObject(PyExc_AttributeError, slot->name);
    return Py_XNewRef(value);
}

/* Whether this value of the field is an int of 32 bits, which is put there; else with an exception. */
static bool is_number(const Slot *slot, PyObject *value, int *into)
{
    int is_beyond = value == NULL || !PyLong_CheckExact(value); /* others run code of their own */
    const long its = is_beyond ? 0 : PyLong_AsLongAndOverflow(value, &is_beyond);
    if (is_beyond || its < INT_MIN || its > INT_MAX) {
        PyErr_Format(PyExc_TypeError, "%U is an int of 32 bits", slot->name);
        return false;
    }
    *into = (int)its;
    return true;
}

/* Whether they are the same object, or equal ints: two columns may have numbers that are no objects. */
static inline bool is_same(PyObject *one, PyObject *other)
{
    return one == other || (one != NULL && other != NULL && PyLong_CheckExact(one) && PyLong_CheckExact(other) &&
                            PyObject_RichCompareBool(one, other, Py_EQ) == 1);
}

static PyObject *runs_of(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 2 || !is_list(arguments[0]) || !PyUnicode_CheckExact(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "wanted are a list of columns and a name");
    Slot slot = {.name = arguments[1]};
    PyObject *runs = PyList_New(0), *last = NULL;
    for (Py_ssize_t i = 0; runs != NULL && i < PyList_GET_SIZE(arguments[0]); i++) {
        PyObject *value = value_of(&slot, PyList_GET_ITEM(arguments[0], i));
        if (value == NULL || (!is_same(value, last) && PyList_Append(runs, value) < 0))
            Py_CLEAR(runs);
        Py_XSETREF(last, value); /* which is in the list, or is a number */
    }
    Py_XDECREF(last);
    Py_XDECREF(slot.type);
    return runs;
}

static PyObject *values_of(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 2 || !is_list(arguments[0]) || !PyUnicode_CheckExact(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "wanted are a list of columns and a name");
    Slot slot = {.name = arguments[1]};
    PyObject *values = as_long_as(arguments[0]);
    for (Py_ssize_t i = 0; values != NULL && i < PyList_GET_SIZE(values); i++) {
        put_item(&values, i, value_of(&slot, PyList_GET_ITEM(arguments[0], i)));
    }
    Py_XDECREF(slot.type);
    return values;
}

static PyObject *numbers_of(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 2 || !is_list(arguments[0]) || !PyUnicode_CheckExact(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "wanted are a list of columns and a name");
    Slot slot = {.name = arguments[1]};
    const Py_ssize_t size = PyList_GET_SIZE(arguments[0]);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, size * (Py_ssize_t)sizeof(int));
    Py_ssize_t i = 0;
    for (; bytes != NULL && i < PyList_GET_SIZE(arguments[0]) && i < size; i++) {
        PyObject *column = PyList_GET_ITEM(arguments[0], i);
        int *into = (int *)PyBytes_AS_STRING(bytes) + i;
        if (!is_in(&slot, column))
            Py_CLEAR(bytes);
        else if (slot.place.is_number)
            *into = *number_in(column, slot.place.offset);
        else if (!is_number(&slot, *field(column, slot.place.offset), into))
            Py_CLEAR(bytes);
    }
    if (bytes != NULL && i < size) { /* by code of others, which `is_in` may run */
        PyErr_SetString(PyExc_RuntimeError, "the list changed meanwhile");
        Py_CLEAR(bytes);
    }
    Py_XDECREF(slot.type);
    PyObject *numbers = bytes == NULL ? NULL : PyObject_CallFunction(type_of_array, "CO", 'i', bytes);
    Py_XDECREF(bytes);
    return numbers;
}

static PyObject *sampled(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "wanted are columns and bits of two bytes");
    const long bits = PyLong_AsLong(arguments[1]);
    Slot slot = {.name = named.key};
    PyObject *columns = bits == -1 && PyErr_Occurred() ? NULL : PySequence_Fast(arguments[0], "wanted are columns");
    PyObject *found = columns == NULL ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; found != NULL && i < PySequence_Fast_GET_SIZE(columns); i++) {
        PyObject *column = PySequence_Fast_GET_ITEM(columns, i);
        PyObject *key = is_in(&slot, column) && !slot.place.is_number ? *field(column, slot.place.offset) : NULL;
        if (key == NULL || !PyBytes_Check(key) || PyBytes_GET_SIZE(key) < 2) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "a key has two bytes or more");
            Py_CLEAR(found);
            continue;
        }
        const uint8_t *bytes = (const uint8_t *)PyBytes_AS_STRING(key);
        if (!((bytes[0] << 8 | bytes[1]) & bits) && PyList_Append(found, column) < 0)
            Py_CLEAR(found);
    }
    Py_XDECREF(slot.type);
    Py_XDECREF(columns);
    return found;
}

static PyObject *stamp(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    Fields fields = {.type = NULL};
    if (count != 2 || !is_list(arguments[0]) || !(PyFloat_Check(arguments[1]) || PyLong_Check(arguments[1])))
        return PyErr_Format(PyExc_TypeError, "wanted are a list of columns and a time");
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arguments[0]); i++) {
        PyObject *column = PyList_GET_ITEM(arguments[0], i);
        if (!found_fields(&fields, column))
            return NULL;
        PyObject **used_at = field(column, fields.used_at);
        if (fields.uses.is_number) {
            int *its = number_in(column, fields.uses.offset);
            *its += *its < INT_MAX;
            Py_XSETREF(*used_at, Py_NewRef(arguments[1])); /* runs no code of others, as below */
            continue;
        }
        PyObject **uses = field(column, fields.uses.offset);
        if (*uses != NULL && !PyLong_CheckExact(*uses)) { /* others run code of their own */
            PyErr_SetString(PyExc_TypeError, "uses are an int");
            return NULL;
        }
        const long before = *uses == NULL ? 0 : PyLong_AsLong(*uses);
        PyObject *more = before == -1 && PyErr_Occurred() ? NULL : PyLong_FromLong(before + (before < LONG_MAX));
        if (more == NULL)
            return NULL;
        /* Numbers all: nothing that is dropped here runs code of others. */
        Py_XSETREF(*uses, more);
        Py_XSETREF(*used_at, Py_NewRef(arguments[1]));
    }
    Py_RETURN_NONE;
}

static PyObject *put_by_key(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 3 || !is_list(arguments[0]) || !is_list(arguments[1]) || !is_list(arguments[2]))
        return PyErr_Format(PyExc_TypeError, "wanted are lists of parts, keys and columns");
    PyObject *keys = arguments[1], *columns = arguments[2];
    if (PyList_GET_SIZE(keys) != PyList_GET_SIZE(columns))
        return PyErr_Format(PyExc_ValueError, "wanted are as many columns as keys");
    bool good = true; /* what is replaced may run code of others: sizes are looked at again, and what is used is held */
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(keys) && i < PyList_GET_SIZE(columns); i++) {
        prefetch_from(arguments[0], keys, i);
        PyObject *key = Py_NewRef(PyList_GET_ITEM(keys, i)), *column = Py_NewRef(PyList_GET_ITEM(columns, i));
        PyObject *part = Py_XNewRef(part_of(arguments[0], key));
        good = part != NULL && PyDict_SetItem(part, key, column) == 0;
        Py_XDECREF(part);
        Py_DECREF(key);
        Py_DECREF(column);
    }
    return good ? Py_NewRef(Py_None) : NULL;
}

static PyObject *drop_by_key(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 2 || !is_list(arguments[0]) || !is_list(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "wanted are lists of parts and keys");
    bool good = true;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(arguments[1]); i++) {
        prefetch_from(arguments[0], arguments[1], i);
        PyObject *key = Py_NewRef(PyList_GET_ITEM(arguments[1], i)), *part = Py_XNewRef(part_of(arguments[0], key));
        good = part != NULL && PyDict_DelItem(part, key) == 0;
        Py_XDECREF(part);
        Py_DECREF(key);
    }
    return good ? Py_NewRef(Py_None) : NULL;
}

static PyObject *put_new(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 3 || !PyDict_Check(arguments[0]) || !is_list(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "wanted are a dict, a list of keys and a value");
    PyObject *others = PyList_New(0);
    for (Py_ssize_t i = 0; others != NULL && i < PyList_GET_SIZE(arguments[1]); i++) {
        PyObject *key = Py_NewRef(PyList_GET_ITEM(arguments[1], i)); /* to compare it may run code of others */
        const Py_ssize_t before = PyDict_GET_SIZE(arguments[0]);
        if (PyDict_SetDefault(arguments[0], key, arguments[2]) == NULL ||
            (PyDict_GET_SIZE(arguments[0]) == before && PyList_Append(others, key) < 0))
            Py_CLEAR(others);
        Py_DECREF(key);
    }
    return others;
}

static PyObject *drop_known(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 2 || !PyDict_Check(arguments[0]) || !is_list(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "wanted are a dict and a list of keys");
    bool good = true;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(arguments[1]); i++) {
        PyObject *key = Py_NewRef(PyList_GET_ITEM(arguments[1], i)); /* what is dropped may run code of others */
        const int is_there = PyDict_Contains(arguments[0], key);
        good = is_there == 0 || (is_there > 0 && PyDict_DelItem(arguments[0], key) == 0);
        Py_DECREF(key);
    }
    return good ? Py_NewRef(Py_None) : NULL;
}

/* Prefetches keys of which each may be looked up in all of these tables. */
static void prefetch_in(PyObject *tables, PyObject *keys, Py_ssize_t first)
{
#if PY_VERSION_HEX < 0x030C0000
    for (Py_ssize_t table = 0; table < PyTuple_GET_SIZE(tables); table++) {
        PyObject *its = PyTuple_GET_ITEM(tables, table);
        for (Py_ssize_t i = first; i < PyList_GET_SIZE(keys) && i < first + AHEAD; i++)
            if (PyDict_Check(its) && PyDict_GET_SIZE(its) > 0 && PyBytes_CheckExact(PyList_GET_ITEM(keys, i)))
                prefetch_index(head_of(its), PyList_GET_ITEM(keys, i));
    }
#endif
    (void)tables, (void)keys, (void)first;
}

/* The value of a key in the first of these tables that has it: borrowed; NULL with an exception. */
static PyObject *value_in(PyObject *tables, PyObject *key, PyObject *otherwise)
{
    if (!PyBytes_CheckExact(key)) { /* whose comparison runs no code of others */
        PyErr_SetString(PyExc_TypeError, "a key is bytes");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tables); i++) {
        PyObject *table = PyTuple_GET_ITEM(tables, i);
        if (!PyDict_Check(table)) {
            PyErr_SetString(PyExc_TypeError, "tables are dicts");
            return NULL;
        }
        PyObject *value = PyDict_GET_SIZE(table) > 0 ? PyDict_GetItemWithError(table, key) : NULL;
        if (value != NULL || PyErr_Occurred())
            return value;
    }
    return otherwise;
}

static PyObject *values_in(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 3 || !PyTuple_Check(arguments[0]) || !is_list(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "wanted are a tuple of dicts, a list of keys and a value");
    PyObject *values = as_long_as(arguments[1]);
    for (Py_ssize_t i = 0; values != NULL && i < PyList_GET_SIZE(arguments[1]); i++) {
        if (i % AHEAD == 0)
            prefetch_in(arguments[0], arguments[1], i);
        put_item(&values, i, Py_XNewRef(value_in(arguments[0], PyList_GET_ITEM(arguments[1], i), arguments[2])));
    }
    return values;
}

/* Where the objects of this class have these fields; false with an exception, as for one that has them not. */
static bool found_all(PyTypeObject *type, PyObject *names, Place *places)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
        if (!found_place(type, PyTuple_GET_ITEM(names, i), &places[i]))
            return false;
    }
    return true;
}

static bool is_tuple_of_names(PyObject *given)
{
    bool is_one = PyTuple_Check(given) && PyTuple_GET_SIZE(given) <= FIELDS_MAX;
    for (Py_ssize_t i = 0; is_one && i < PyTuple_GET_SIZE(given); i++)
        is_one = PyUnicode_CheckExact(PyTuple_GET_ITEM(given, i));
    return is_one;
}

static bool has_same(PyObject *column, PyObject *other, const Place *place)
{
    if (place->is_number)
        return *number_in(column, place->offset) == *number_in(other, place->offset);
    return is_same(*field(column, place->offset), *field(other, place->offset));
}

static bool has_all_same(PyObject *column, PyObject *other, const Place *places, Py_ssize_t names)
{
    for (Py_ssize_t i = 0; i < names; i++)
        if (!has_same(column, other, &places[i]))
            return false;
    return true;
}

static PyObject *alike(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 2 || !PyList_Check(arguments[0]) || !is_tuple_of_names(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "wanted are a list of columns and a tuple of names");
    Place places[FIELDS_MAX];
    bool are_alike = true;
    if (PyList_GET_SIZE(arguments[0]) > 0 && !found_all(Py_TYPE(PyList_GET_ITEM(arguments[0], 0)), arguments[1], places))
        return NULL;
    for (Py_ssize_t i = 1; are_alike && i < PyList_GET_SIZE(arguments[0]); i++) { /* in which no code of others runs */
        PyObject *first = PyList_GET_ITEM(arguments[0], 0), *column = PyList_GET_ITEM(arguments[0], i);
        are_alike = Py_TYPE(column) == Py_TYPE(first) && has_all_same(column, first, places, PyTuple_GET_SIZE(arguments[1]));
    }
    return PyBool_FromLong(are_alike);
}

/* Whether the column is referenced once, and has the same in these fields: -1 with an exception. */
static int is_alike(PyObject *column, PyObject *other, Py_ssize_t ref_count, const Place *places, Py_ssize_t names)
{
    PyObject *references = *field(column, ref_count);
    if (references == NULL || !PyLong_CheckExact(references)) {
        PyErr_SetString(PyExc_TypeError, "a number of references is an int");
        return -1;
    }
    const long held = PyLong_AsLong(references);
    if (held == -1 && PyErr_Occurred())
        return -1;
    return held == 1 && has_all_same(column, other, places, names);
}

static PyObject *line_to(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 3 || !is_tuple_of_names(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "wanted are a column, a tuple of names and a number");
    PyObject *column = arguments[0];
    PyTypeObject *type = Py_TYPE(column);
    const Py_ssize_t names = PyTuple_GET_SIZE(arguments[1]), most = PyLong_AsSsize_t(arguments[2]);
    Place places[FIELDS_MAX];
    Py_ssize_t parent, ref_count;
    if ((most == -1 && PyErr_Occurred()) || (parent = offset_of(type, named.parent)) < 0 ||
        (ref_count = offset_of(type, named.ref_count)) < 0 || !found_all(type, arguments[1], places))
        return NULL;
    PyObject *line = PyList_New(1);
    if (line == NULL)
        return NULL;
    PyList_SET_ITEM(line, 0, Py_NewRef(column));
    while (PyList_GET_SIZE(line) < most) { /* in which no code of others runs */
        PyObject *before = *field(PyList_GET_ITEM(line, PyList_GET_SIZE(line) - 1), parent);
        if (before == NULL || Py_TYPE(before) != type)
            break;
        const int alike = is_alike(before, column, ref_count, places, names);
        if (alike == 0)
            break;
        if (alike < 0 || PyList_Append(line, before) < 0) {
            Py_DECREF(line);
            return NULL;
        }
    }
    return line;
}

static bool put_field(Slot *slot, PyObject *column, PyObject *value)
{
    if (!is_in(slot, column))
        return false;
    if (slot->place.is_number)
        return is_number(slot, value, number_in(column, slot->place.offset));
    Py_INCREF(column); /* what is dropped may run code of others */
    Py_XSETREF(*field(column, slot->place.offset), Py_NewRef(value));
    Py_DECREF(column);
    return true;
}

static PyObject *put(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 3 || !is_list(arguments[0]) || !PyUnicode_CheckExact(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "wanted are a list of columns, a name and a value");
    Slot slot = {.name = arguments[1]};
    bool good = true;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(arguments[0]); i++)
        good = put_field(&slot, PyList_GET_ITEM(arguments[0], i), arguments[2]);
    Py_XDECREF(slot.type);
    return good ? Py_NewRef(Py_None) : NULL;
}

static PyObject *put_each(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 3 || !is_list(arguments[0]) || !PyUnicode_CheckExact(arguments[1]) || !is_list(arguments[2]))
        return PyErr_Format(PyExc_TypeError, "wanted are a list of columns, a name and a list of values");
    if (PyList_GET_SIZE(arguments[0]) != PyList_GET_SIZE(arguments[2]))
        return PyErr_Format(PyExc_ValueError, "wanted are as many values as columns");
    Slot slot = {.name = arguments[1]};
    bool good = true;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(arguments[0]) && i < PyList_GET_SIZE(arguments[2]); i++)
        good = put_field(&slot, PyList_GET_ITEM(arguments[0], i), PyList_GET_ITEM(arguments[2], i));
    Py_XDECREF(slot.type);
    return good ? Py_NewRef(Py_None) : NULL;
}

static PyObject *copies(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 3 || !is_tuple_of_names(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "wanted are a column, a tuple of names and a number");
    PyObject *column = arguments[0];
    PyTypeObject *type = Py_TYPE(column);
    const Py_ssize_t names = PyTuple_GET_SIZE(arguments[1]), number = PyLong_AsSsize_t(arguments[2]);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    Place places[FIELDS_MAX];
    if (!found_all(type, arguments[1], places))
        return NULL;
    if (type->tp_new != PyBaseObject_Type.tp_new)
        return PyErr_Format(PyExc_TypeError, "%s makes its objects in its own way", type->tp_name);
    PyObject *list = PyList_New(0);
    for (Py_ssize_t made = 0; list != NULL && made < number; made++) {
        PyObject *copy = type->tp_alloc(type, 0); /* which may collect garbage */
        for (Py_ssize_t i = 0; copy != NULL && i < names; i++) {
            const Py_ssize_t at = places[i].offset;
            if (places[i].is_number) {
                *number_in(copy, at) = *number_in(column, at);
                continue;
            }
            PyObject *value = *field(column, at);
            if (value != NULL) {
                *field(copy, at) = Py_NewRef(value);
                continue;
            }
            PyErr_SetObject(PyExc_AttributeError, PyTuple_GET_ITEM(arguments[1], i));
            Py_CLEAR(copy);
        }
        if (copy == NULL || PyList_Append(list, copy) < 0)
            Py_CLEAR(list);
        Py_XDECREF(copy);
    }
    return list;
}

/* A table of numbers, to be written to: false with an exception. */
static bool got_table(PyObject *given, Py_buffer *table)
{
    if (PyObject_GetBuffer(given, table, PyBUF_CONTIG | PyBUF_FORMAT) < 0)
        return false;
    if (table->itemsize == sizeof(uint64_t) && table->len > 0)
        return true;
    PyBuffer_Release(table);
    PyErr_SetString(PyExc_TypeError, "a table has numbers of 64 bits");
    return false;
}

/* The slot of a key, and its number; NULL with an exception. */
static uint64_t *slot_of(const Py_buffer *table, PyObject *key, uint64_t *number)
{
    if (!PyBytes_Check(key) || PyBytes_GET_SIZE(key) != KEY) {
        PyErr_SetString(PyExc_TypeError, "a key has 16 bytes");
        return NULL;
    }
    const uint8_t *bytes = (const uint8_t *)PyBytes_AS_STRING(key) + KEY / 2;
    *number = 0;
    for (int i = 0; i < KEY / 2; i++)
        *number |= (uint64_t)bytes[i] << 8 * i;
    const size_t slots = (size_t)table->len / sizeof(uint64_t);
    const size_t mask = slots > 1 ? SIZE_MAX >> __builtin_clzl(slots - 1) : 0, place = *number & mask;
    return (uint64_t *)table->buf + (place < slots ? place : place & mask >> 1);
}

static PyObject *note(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    Py_buffer table;
    if (count != 2 || !is_list(arguments[0]))
        return PyErr_Format(PyExc_TypeError, "wanted are a list of keys and a table");
    if (!got_table(arguments[1], &table))
        return NULL;
    Py_ssize_t i = 0;
    for (; i < PyList_GET_SIZE(arguments[0]); i++) { /* in which no code of others runs */
        uint64_t number, *slot = slot_of(&table, PyList_GET_ITEM(arguments[0], i), &number);
        if (slot == NULL)
            break;
        *slot = number;
    }
    const bool is_done = i == PyList_GET_SIZE(arguments[0]);
    PyBuffer_Release(&table);
    return is_done ? Py_NewRef(Py_None) : NULL;
}

static PyObject *noted(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    Py_buffer table;
    if (count != 2 || !is_list(arguments[0]))
        return PyErr_Format(PyExc_TypeError, "wanted are a list of keys and a table");
    if (!got_table(arguments[1], &table))
        return NULL;
    PyObject *found = as_long_as(arguments[0]);
    for (Py_ssize_t i = 0; found != NULL && i < PyList_GET_SIZE(arguments[0]); i++) {
        uint64_t number;
        const uint64_t *slot = slot_of(&table, PyList_GET_ITEM(arguments[0], i), &number);
        put_item(&found, i, slot == NULL ? NULL : Py_NewRef(*slot == number ? Py_True : Py_False));
    }
    PyBuffer_Release(&table);
    return found;
}

int add_prompts(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"packed", packed, METH_O, "Loops.packed(tokens)"},
        {"chained", FAST(chained), "Loops.chained(key, first, tokens, unit_tokens)"},
        {"find", FAST(find), "Loops.find(parts, keys, known, count, ready, linked)"},
        {"fresh", FAST(fresh), "Loops.fresh(columns, start, ready, born, seen, now)"},
        {"runs_of", FAST(runs_of), "Loops.runs_of(columns, name)"},
        {"alike", FAST(alike), "Loops.alike(columns, names)"},
        {"values_of", FAST(values_of), "Loops.values_of(columns, name)"},
        {"numbers_of", FAST(numbers_of), "Loops.numbers_of(columns, name)"},
        {"sampled", FAST(sampled), "Loops.sampled(columns, bits)"},
        {"stamp", FAST(stamp), "Loops.stamp(columns, now)"},
        {"put_by_key", FAST(put_by_key), "Loops.put_by_key(parts, keys, columns)"},
        {"drop_by_key", FAST(drop_by_key), "Loops.drop_by_key(parts, keys)"},
        {"put_new", FAST(put_new), "Loops.put_new(table, keys, value)"},
        {"drop_known", FAST(drop_known), "Loops.drop_known(table, keys)"},
        {"values_in", FAST(values_in), "Loops.values_in(tables, keys, otherwise)"},
        {"line_to", FAST(line_to), "Loops.line_to(column, names, most)"},
        {"put", FAST(put), "Loops.put(columns, name, value)"},
        {"put_each", FAST(put_each), "Loops.put_each(columns, name, values)"},
        {"copies", FAST(copies), "Loops.copies(column, names, count)"},
        {"note", FAST(note), "Loops.note(keys, table)"},
        {"noted", FAST(noted), "Loops.noted(keys, table)"},
        {NULL, NULL, 0, NULL},
    };
    PyObject *sha = has_sha() ? Py_True : Py_False;
    const struct {
        PyObject **name;
        const char *text;
    } names[] = {
        {&named.state, "state"}, {&named.stored_at, "stored_at"}, {&named.used_at, "used_at"}, {&named.terms, "terms"},
        {&named.uses, "uses"},   {&named.parent, "parent"},       {&named.key, "key"},         {&named.depth, "depth"},
        {&named.ttl, "ttl"},     {&named.ref_count, "ref_count"}, {&named.expires_at, "expires_at"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if ((*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL)
            return -1;
    PyObject *arrays = PyImport_ImportModule("array");
    type_of_array = arrays == NULL ? NULL : PyObject_GetAttrString(arrays, "array");
    Py_XDECREF(arrays);
    if (type_of_array == NULL)
        return -1;
    return PyModule_AddFunctions(module, methods) < 0 ? -1 : PyModule_AddObjectRef(module, "has_sha", sha);
}
