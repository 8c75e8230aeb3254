/* Copying a payload and summing it up in one pass over its bytes, for each kind of processor.

   Justified by shm.evict.*.native, shm.refill_copy.*.native and shm.refill_view.*.native: 15 to 40 GB/s
   where Python's two passes make 9 to 20.

   The checksum is XXH3-64, seed 0, written after the published specification of the algorithm. Its short
   inputs (up to 240 bytes, four algorithms of their own) stay with the xxhash package, see payloads.c.

   A checksum is of the bytes that were stored, whatever another process does to the source meanwhile:
   each byte is loaded once, and what was loaded is both stored and summed, or it is summed where it
   was stored. */

#include "native.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(TIDEGATE_PORTABLE)
#define WITH_AVX
#include <immintrin.h>
#endif

enum { STRIPES = 16, BLOCK = STRIPE * STRIPES, LANES = 8 };

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

/* What a machine prefetches by itself ends with the page, and finding the next one takes a walk through two
   tables in a virtual machine, with stores queueing up behind it. So one line of it is asked for a page
   ahead, on both sides, and the first lines of all as soon as they are known. Measured over far more memory
   than the caches of a Zen 5 hold, this makes 1.03 to 1.25 times the speed from 64 KiB to 1 MiB. Asking for
   every line, at any distance, gains less, and so did working on several pages at once.

   It is called at the beginning of each block: at most two pages begin in four of them. */
static inline void prefetch_next(const uint8_t *into, const uint8_t *from, size_t stripes, enum store how)
{
    if (stripes <= PAGE / STRIPE)
        return;
    if ((uintptr_t)from % PAGE < BLOCK)
        PREFETCH(from + PAGE);
    if (how != NOT_AT_ALL && (uintptr_t)into % PAGE < BLOCK)
        PREFETCH(into + PAGE);
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
        prefetch_next(into, from, count, how);
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
        prefetch_next(into, from, count, how);
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
        prefetch_next(into, from, count, how);
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
int levels_found;
static Stripes *stripes_used;

void find_levels(void)
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

const char *name_of_level(int index)
{
    return levels[index].name;
}

/* Whether this machine has a level of this name, which is used from now on. */
bool use_level(const char *name)
{
    for (int i = 0; i < levels_found; i++)
        if (strcmp(levels[i].name, name) == 0) {
            stripes_used = levels[i].stripes;
            return true;
        }
    return false;
}

/* The 128-bit product of two words, its halves folded into one. Not every machine has such a type. */
static uint64_t folded_product(uint64_t left, uint64_t right)
{
    const uint64_t a = left & 0xFFFFFFFF, b = left >> 32, c = right & 0xFFFFFFFF, d = right >> 32;
    const uint64_t low = a * c, one = b * c, other = a * d, high = b * d;
    const uint64_t middle = (low >> 32) + (one & 0xFFFFFFFF) + other;
    return (high + (one >> 32) + (middle >> 32)) ^ (middle << 32 | (low & 0xFFFFFFFF));
}

void begin_sum(Sum *sum)
{
    *sum = (Sum){
        {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1}, 0,
    };
}

/* Sum up whole blocks of what has arrived. The last stripe of a payload is not part of one. */
void sum_up_to(Sum *sum, const uint8_t *payload, size_t arrived, size_t length)
{
    const size_t blocks = ((arrived < length ? arrived : length - 1) - sum->summed) / BLOCK;
    if (blocks > 0)
        stripes_used(sum->lanes, NULL, payload + sum->summed, blocks * STRIPES, NOT_AT_ALL);
    sum->summed += blocks * BLOCK;
}

/* The last stripe, which is a whole one even if it overlaps with what is before it, has a secret of its own. */
static uint64_t merged(uint64_t sums[LANES], const uint8_t *last_stripe, size_t length)
{
    add_stripe(sums, last_stripe, SECRET + SECRET_OF_LAST_STRIPE);
    uint64_t merged = length * PRIME64_1;
    for (int lane = 0; lane < LANES; lane += 2) {
        const uint8_t *secret = SECRET + SECRET_OF_MERGE + 8 * lane;
        merged += folded_product(sums[lane] ^ word_at(secret), sums[lane + 1] ^ word_at(secret + 8));
    }
    merged = (merged ^ merged >> 37) * PRIME_MIX;
    return merged ^ merged >> 32;
}

uint64_t end_sum(Sum *sum, const uint8_t *payload, size_t length)
{
    const size_t left = (length - 1 - sum->summed) / STRIPE;
    stripes_used(sum->lanes, NULL, payload + sum->summed, left, NOT_AT_ALL);
    return merged(sum->lanes, payload + length - STRIPE, length);
}

/* Copy more than SHORT_MAX bytes, unless `how` says not to; their checksum. */
uint64_t copied(uint8_t *into, const uint8_t *from, size_t length, enum store how)
{
    Sum sum;
    begin_sum(&sum);
    const size_t whole = (length - 1) / STRIPE, rest = length - whole * STRIPE;
    prefetch_first(how == NOT_AT_ALL ? NULL : into, from, length);
    stripes_used(sum.lanes, into, from, whole, how);
    if (how != NOT_AT_ALL) { /* and what follows is summed where it is stored */
        memcpy(into + length - rest, from + length - rest, rest);
        from = into;
    }
    const uint64_t made = merged(sum.lanes, from + length - STRIPE, length);
#ifdef WITH_AVX
    /* Streamed stores become visible in any order. The fence puts them before the header that is written
       next, so that nobody sees a seal on bytes that are still on their way. */
    if (how == STREAMED)
        _mm_sfence();
#endif
    return made;
}

/* XXH3-64 of 33 to 64 bytes, as the specification has it: here of the 60 of a header that its check covers. */
uint32_t check_of_header(const uint8_t *header)
{
    enum { CHECKED = 60 };
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
