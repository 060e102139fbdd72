/* Where do the bytes of one element of a datatype lie, in which order, and what are they?
 *
 * A layout is a tree that is never changed once it is made, and shared by all datatypes that need it. A leaf is a
 * number of values of one basic kind, one after the other. Any other node has parts in the order of the data, each of
 * them a number of copies of another layout with a stride: so a vector of a million blocks is one part, and what is
 * nested takes the memory of its nodes and not of their product. Source: MPI 4.1, section 5.1.
 */
#ifndef REMESH_LAYOUT_H
#define REMESH_LAYOUT_H

#include "datatype.h"

typedef struct Layout Layout;

/* `count` copies of a layout, of which the first begins at `offset`. */
typedef struct {
    MPI_Aint offset, stride;
    MPI_Count count;
    Layout *layout;
} Part;

struct Layout {
    _Atomic int references;
    Basic basic;              /* of a leaf; else BASIC_NONE */
    MPI_Count size;           /* bytes of data */
    MPI_Count num_values;     /* basic values */
    MPI_Aint first, end;      /* offsets of the lowest byte and behind the highest; both 0 if there are none */
    bool is_run;              /* the data are one run of bytes from `first` on, in order */
    MPI_Count num_parts;      /* 0: a leaf */
    Part *parts;
};

/* `count` runs of bytes, of which the first begins at `offset`. */
typedef struct {
    MPI_Aint offset, stride;
    MPI_Count num_bytes, count;
} Row;

/* Values of one kind, one after the other; where they stand in memory. */
typedef struct {
    MPI_Aint offset;
    MPI_Count count;
    Basic basic;
} Values;

INTERNAL Layout *leaf_layout(Basic basic, MPI_Count count);
/* Of parts in the order of the data; takes the array, and references of its own to what the parts are made of. */
INTERNAL Layout *layout_of_parts(MPI_Count num_parts, Part *parts);
INTERNAL Layout *keep_layout(Layout *layout);
INTERNAL void drop_layout(Layout *layout);
/* Parts of a layout that grow one by one: neighbours that are a regular row become one. */
typedef struct {
    MPI_Count num_parts, room;
    Part *parts;
} PartList;
INTERNAL void add_part(PartList *list, Part part);

/* Calls `each` for the data of a part in their order, until it says false. False if it did. */
INTERNAL bool visit_rows(const Part *part, MPI_Aint base, bool (*each)(void *state, Row row), void *state);
INTERNAL void visit_values(const Part *part, MPI_Aint base, void (*each)(void *state, Values values), void *state);
/* How many basic values stand in the first `num_bytes` of the data; -1 if they end amid a value. */
INTERNAL MPI_Count values_in(const Layout *layout, MPI_Count num_bytes);

#endif
