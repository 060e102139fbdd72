/* What is known of each basic kind of value. */
#ifndef REMESH_BASIC_H
#define REMESH_BASIC_H

#include "datatype.h"

typedef enum { OF_BYTES, OF_INTEGERS, OF_REALS, OF_COMPLEX, OF_LOGICALS, OF_PAIRS } BasicKind;

typedef struct {
    BasicKind kind;
    uint8_t size;      /* bytes of data; of a pair without the gap that it has in memory */
    uint8_t alignment;
    uint8_t unit;      /* bytes that are turned round where the other order of bytes is wanted */
    int8_t real_type;  /* index into REAL_TYPES; -1: the real MPI does not reduce it */
    Basic value, index; /* of a pair */
} BasicRow;

INTERNAL const BasicRow *basic_of(Basic basic);

#endif
