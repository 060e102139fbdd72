/* Datatypes: where the elements of a buffer stand, and what they are. */
#ifndef REMESH_DATATYPE_H
#define REMESH_DATATYPE_H

#include "attributes.h"
#include "core.h"

/* What a predefined datatype is, face or language aside; BASIC_NONE: several, or bytes without a meaning. */
typedef enum {
    BASIC_NONE, BASIC_BYTE, BASIC_CHAR, BASIC_INT8, BASIC_INT16, BASIC_INT32, BASIC_INT64, BASIC_UINT8, BASIC_UINT16,
    BASIC_UINT32, BASIC_UINT64, BASIC_FLOAT, BASIC_DOUBLE, BASIC_LONG_DOUBLE, BASIC_BOOL, BASIC_LOGICAL, BASIC_FLOAT_COMPLEX,
    BASIC_DOUBLE_COMPLEX, BASIC_LONG_DOUBLE_COMPLEX, BASIC_SHORT_INT, BASIC_2INT, BASIC_LONG_INT, BASIC_FLOAT_INT,
    BASIC_DOUBLE_INT, BASIC_LONG_DOUBLE_INT, BASIC_2REAL, BASIC_2DOUBLE, BASIC_FLOAT16, BASIC_FLOAT128, NUM_BASICS
} Basic;

/* A run of bytes of one element, from its address. */
typedef struct {
    MPI_Aint offset;
    MPI_Count num_bytes;
} Segment;

struct Datatype {
    Object object;
    MPI_Count size;   /* bytes of data of one element */
    MPI_Aint lb, extent, true_lb, true_extent;
    bool is_dense;    /* elements follow each other without gaps, from the buffer's address on, in order */
    bool is_committed;
    Basic basic;      /* of all its leaves, if they are alike */
    MPI_Count num_segments;
    Segment *segments; /* in the order of the data */
    Attributes attributes;
    char name[MPI_MAX_OBJECT_NAME];
    struct Recipe *recipe; /* how the program made it (datatype.c); NULL of a predefined one */
};

/* Bytes of `count` elements. */
static inline int64_t data_bytes(const Datatype *type, MPI_Count count) { return type->size * count; }
/* Copies the data of `count` elements, in order and without gaps. */
INTERNAL void pack_elements(const void *from, MPI_Count count, const Datatype *type, void *to);
/* Puts up to `num_bytes` of packed data in their places; a message may be shorter than the buffer. */
INTERNAL void unpack_elements(const void *from, int64_t num_bytes, void *to, MPI_Count count, const Datatype *type);
/* Index into REAL_TYPES of calls/table.py of what all leaves are, for a reduction by the real MPI; -1 if it has none. */
INTERNAL int real_type(const Datatype *type);
/* Calls `each` for every maximal run of bytes of `count` elements at `base`, in the order of the data. */
INTERNAL void visit_runs(const Datatype *type, MPI_Aint base, MPI_Count count, void (*each)(void *state, Segment run), void *state);

/* The data of a buffer as one run of bytes: the buffer itself where it is dense, else a packed copy in `owned`. */
typedef struct {
    const void *at;
    int64_t num_bytes;
    void *owned; /* to be freed; NULL if it is the buffer itself */
} Payload;
INTERNAL Payload payload_of(const void *buffer, MPI_Count count, const Datatype *type);

/* Where data go that come as one run of bytes: into the buffer itself where it is dense, else into `owned` first. */
typedef struct {
    void *buffer;
    MPI_Count count;
    Datatype *type; /* kept; NULL: nothing lands here */
    void *owned;
    void *at;       /* for an Operation */
    int64_t room;
} Landing;
INTERNAL Landing landing_for(void *buffer, MPI_Count count, Datatype *type);
/* `num_bytes` have come: puts them into the buffer, and lets all go. */
INTERNAL void land(Landing *landing, int64_t num_bytes);
/* Nothing has come. */
INTERNAL void drop_landing(Landing *landing);
/* Makes what is behind the predefined handles, when the library is loaded. */
INTERNAL void make_predefined_datatypes(void);

#endif
