/* Groups: ordered sets of world ranks. */
#ifndef REMESH_GROUP_H
#define REMESH_GROUP_H

#include "core.h"

struct Group {
    Object object;
    int size;
    int *world; /* world rank of each */
    Session *session; /* that it was made from; NULL */
};

/* MPI_GROUP_EMPTY if size is 0; copies `world`. The caller owns a reference. */
INTERNAL Group *make_group(int size, const int *world);
/* Rank of a world rank in it, or MPI_UNDEFINED. */
INTERNAL int rank_in_group(const Group *group, int world);
/* Makes what is behind the predefined handles, when the library is loaded. */
INTERNAL void make_predefined_groups(void);

#endif
