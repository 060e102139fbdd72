/* Datatypes: where the elements of a buffer stand, and what they are. */
#ifndef REMESH_DATATYPE_H
#define REMESH_DATATYPE_H

#include "attributes.h"
#include "core.h"

/* What a value is, face and language aside; BASIC_NONE: several kinds. Those from BASIC_SHORT_INT on are pairs. */
typedef enum {
    BASIC_NONE, BASIC_BYTE, BASIC_CHAR, BASIC_WCHAR, BASIC_INT8, BASIC_INT16, BASIC_INT32, BASIC_INT64, BASIC_INT128,
    BASIC_UINT8, BASIC_UINT16, BASIC_UINT32, BASIC_UINT64, BASIC_FLOAT16, BASIC_FLOAT, BASIC_DOUBLE, BASIC_LONG_DOUBLE,
    BASIC_FLOAT128, BASIC_BOOL, BASIC_LOGICAL1, BASIC_LOGICAL2, BASIC_LOGICAL4, BASIC_LOGICAL8, BASIC_LOGICAL16,
    BASIC_FLOAT16_COMPLEX, BASIC_FLOAT_COMPLEX, BASIC_DOUBLE_COMPLEX, BASIC_LONG_DOUBLE_COMPLEX, BASIC_FLOAT128_COMPLEX,
    BASIC_SHORT_INT, BASIC_2INT, BASIC_LONG_INT, BASIC_FLOAT_INT, BASIC_DOUBLE_INT, BASIC_LONG_DOUBLE_INT, BASIC_2REAL,
    BASIC_2DOUBLE, NUM_BASICS
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
    bool has_lb, has_ub; /* the program has set the bound: it counts for what the type becomes a part of */
    uint8_t alignment;   /* bytes that C places it at multiples of */
    Basic basic;      /* of all that it is made of, if that is alike */
    struct Layout *layout; /* layout.h */
    Attributes attributes;
    char name[MPI_MAX_OBJECT_NAME];
    struct Recipe *recipe; /* how the program made it (recipe.h); NULL of a predefined one */
};

/* Bytes of `count` elements. */
static inline int64_t data_bytes(const Datatype *type, MPI_Count count) { return type->size * count; }
/* Copies the data of `count` elements, in order and without gaps. */
INTERNAL void pack_elements(const void *from, MPI_Count count, const Datatype *type, void *to);
/* Puts up to `num_bytes` of packed data in their places; a message may be shorter than the buffer. */
INTERNAL void unpack_elements(const void *from, int64_t num_bytes, void *to, MPI_Count count, const Datatype *type);
/* How many basic values stand in so many bytes of packed data, as MPI_Get_elements counts; MPI_UNDEFINED if they end
 * amid one.
 */
INTERNAL MPI_Count count_values(const Datatype *type, int64_t num_bytes);
/* Index into REAL_TYPES of calls/table.py of what all values are, for the real MPI; -1 if it has none. */
INTERNAL int real_type(const Datatype *type);
/* Calls `each` for every maximal run of bytes of `count` elements at `base`, in the order of the data. */
INTERNAL void visit_runs(
    const Datatype *type, MPI_Aint base, MPI_Count count, void (*each)(void *state, Segment run), void *state);

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
