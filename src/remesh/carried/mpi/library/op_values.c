/* The predefined operations, value by value: a table of one loop for each operation and kind of value that it is for.
 *
 * Integers wrap around. Logical operations take numbers, too, as programs and other MPI libraries do. Of equal values
 * MPI_MINLOC and MPI_MAXLOC keep the smaller index. Source: MPI 4.1, section 6.9.2.
 */
#include "op_values.h"

#include <complex.h>

#include "channel.h"

/* Packed values may begin anywhere, so no alignment is promised. */
#define LOOSE(name, type) typedef type name __attribute__((aligned(1), may_alias))
LOOSE(int8, int8_t);
LOOSE(int16, int16_t);
LOOSE(int32, int32_t);
LOOSE(int64, int64_t);
LOOSE(uint8, uint8_t);
LOOSE(uint16, uint16_t);
LOOSE(uint32, uint32_t);
LOOSE(uint64, uint64_t);
LOOSE(half, _Float16);
LOOSE(single, float);
LOOSE(twofold, double);
LOOSE(extended, long double);
LOOSE(quad, _Float128);
LOOSE(half_complex, _Complex _Float16);
LOOSE(single_complex, _Complex float);
LOOSE(twofold_complex, _Complex double);
LOOSE(extended_complex, _Complex long double);
#ifdef __clang__ /* there _Float128 is a name of the headers, and no type to build on */
LOOSE(quad_complex, _Complex __float128);
#else
LOOSE(quad_complex, _Complex _Float128);
#endif

#define LOOP(name, T, result)                                                                                     \
    static void name(const void *in_, void *inout_, MPI_Count count) {                                            \
        const T *in = in_;                                                                                        \
        T *inout = inout_;                                                                                        \
        for (MPI_Count i = 0; i < count; i++) {                                                                   \
            T x = in[i], y = inout[i];                                                                            \
            inout[i] = (T)(result);                                                                               \
        }                                                                                                         \
    }

#define LOGICAL_LOOPS(T)           \
    LOOP(land_##T, T, x && y)      \
    LOOP(lor_##T, T, x || y)       \
    LOOP(lxor_##T, T, !x != !y)
#define BIT_LOOPS(T)               \
    LOOP(band_##T, T, x & y)       \
    LOOP(bor_##T, T, x | y)        \
    LOOP(bxor_##T, T, x ^ y)
#define ORDER_LOOPS(T)             \
    LOOP(max_##T, T, y > x ? y : x) \
    LOOP(min_##T, T, y < x ? y : x)
#define INTEGER_LOOPS(T)                             \
    LOOP(sum_##T, T, (uint64_t)x + (uint64_t)y)      \
    LOOP(prod_##T, T, (uint64_t)x * (uint64_t)y)     \
    ORDER_LOOPS(T) LOGICAL_LOOPS(T) BIT_LOOPS(T)
#define COMPLEX_LOOPS(T)           \
    LOOP(sum_##T, T, x + y)        \
    LOOP(prod_##T, T, x * y)
#define REAL_LOOPS(T) COMPLEX_LOOPS(T) ORDER_LOOPS(T) LOGICAL_LOOPS(T)

INTEGER_LOOPS(int8)
INTEGER_LOOPS(int16)
INTEGER_LOOPS(int32)
INTEGER_LOOPS(int64)
INTEGER_LOOPS(uint8)
INTEGER_LOOPS(uint16)
INTEGER_LOOPS(uint32)
INTEGER_LOOPS(uint64)
REAL_LOOPS(half)
REAL_LOOPS(single)
REAL_LOOPS(twofold)
REAL_LOOPS(extended)
REAL_LOOPS(quad)
COMPLEX_LOOPS(half_complex)
COMPLEX_LOOPS(single_complex)
COMPLEX_LOOPS(twofold_complex)
COMPLEX_LOOPS(extended_complex)
COMPLEX_LOOPS(quad_complex)

/* Pairs as they are packed: without the gap that they may have in memory. */
#define PAIR_LOOP(name, value_type, index_type, order)                                                            \
    static void name(const void *in_, void *inout_, MPI_Count count) {                                            \
        typedef struct __attribute__((packed, may_alias)) { value_type value; index_type index; } Pair;           \
        const Pair *in = in_;                                                                                     \
        Pair *inout = inout_;                                                                                     \
        for (MPI_Count i = 0; i < count; i++) {                                                                   \
            bool is_equal = in[i].value == inout[i].value;                                                        \
            if (is_equal ? in[i].index < inout[i].index : in[i].value order inout[i].value) inout[i] = in[i];     \
        }                                                                                                         \
    }
#define PAIR_LOOPS(name, value_type, index_type)            \
    PAIR_LOOP(minloc_##name, value_type, index_type, <)     \
    PAIR_LOOP(maxloc_##name, value_type, index_type, >)

PAIR_LOOPS(short_int, int16_t, int32_t)
PAIR_LOOPS(two_int, int32_t, int32_t)
PAIR_LOOPS(long_int, int64_t, int32_t)
PAIR_LOOPS(float_int, float, int32_t)
PAIR_LOOPS(double_int, double, int32_t)
PAIR_LOOPS(long_double_int, long double, int32_t)
PAIR_LOOPS(two_real, float, float)
PAIR_LOOPS(two_double, double, double)

/* ---- The table ---- */

#define LOGICAL_ROW(T) [OP_LAND] = land_##T, [OP_LOR] = lor_##T, [OP_LXOR] = lxor_##T
#define BIT_ROW(T) [OP_BAND] = band_##T, [OP_BOR] = bor_##T, [OP_BXOR] = bxor_##T
#define COMPLEX_ROW(T) [OP_SUM] = sum_##T, [OP_PROD] = prod_##T
#define REAL_ROW(T) COMPLEX_ROW(T), [OP_MAX] = max_##T, [OP_MIN] = min_##T, LOGICAL_ROW(T)
#define INTEGER_ROW(T) REAL_ROW(T), BIT_ROW(T)
#define PAIR_ROW(name) [OP_MINLOC] = minloc_##name, [OP_MAXLOC] = maxloc_##name

static Fold *const folds[NUM_BASICS][OP_MAXLOC + 1] = {
    [BASIC_BYTE] = {BIT_ROW(uint8)},
    [BASIC_CHAR] = {INTEGER_ROW(int8)},
    [BASIC_INT8] = {INTEGER_ROW(int8)},
    [BASIC_INT16] = {INTEGER_ROW(int16)},
    [BASIC_INT32] = {INTEGER_ROW(int32)},
    [BASIC_INT64] = {INTEGER_ROW(int64)},
    [BASIC_UINT8] = {INTEGER_ROW(uint8)},
    [BASIC_UINT16] = {INTEGER_ROW(uint16)},
    [BASIC_UINT32] = {INTEGER_ROW(uint32)},
    [BASIC_UINT64] = {INTEGER_ROW(uint64)},
    [BASIC_FLOAT16] = {REAL_ROW(half)},
    [BASIC_FLOAT] = {REAL_ROW(single)},
    [BASIC_DOUBLE] = {REAL_ROW(twofold)},
    [BASIC_LONG_DOUBLE] = {REAL_ROW(extended)},
    [BASIC_FLOAT128] = {REAL_ROW(quad)},
    [BASIC_BOOL] = {LOGICAL_ROW(uint8)},
    [BASIC_LOGICAL1] = {LOGICAL_ROW(uint8)},
    [BASIC_LOGICAL2] = {LOGICAL_ROW(uint16)},
    [BASIC_LOGICAL4] = {LOGICAL_ROW(uint32)},
    [BASIC_LOGICAL8] = {LOGICAL_ROW(uint64)},
    [BASIC_FLOAT16_COMPLEX] = {COMPLEX_ROW(half_complex)},
    [BASIC_FLOAT_COMPLEX] = {COMPLEX_ROW(single_complex)},
    [BASIC_DOUBLE_COMPLEX] = {COMPLEX_ROW(twofold_complex)},
    [BASIC_LONG_DOUBLE_COMPLEX] = {COMPLEX_ROW(extended_complex)},
    [BASIC_FLOAT128_COMPLEX] = {COMPLEX_ROW(quad_complex)},
    [BASIC_SHORT_INT] = {PAIR_ROW(short_int)},
    [BASIC_2INT] = {PAIR_ROW(two_int)},
    [BASIC_LONG_INT] = {PAIR_ROW(long_int)},
    [BASIC_FLOAT_INT] = {PAIR_ROW(float_int)},
    [BASIC_DOUBLE_INT] = {PAIR_ROW(double_int)},
    [BASIC_LONG_DOUBLE_INT] = {PAIR_ROW(long_double_int)},
    [BASIC_2REAL] = {PAIR_ROW(two_real)},
    [BASIC_2DOUBLE] = {PAIR_ROW(two_double)},
};

Fold *fold_of(int op, Basic basic) { return op >= 0 && op <= OP_MAXLOC ? folds[basic][op] : NULL; }
