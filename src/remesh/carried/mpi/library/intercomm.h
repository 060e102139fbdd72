/* Intercommunicators: what constructors do between two groups. */
#ifndef REMESH_INTERCOMM_H
#define REMESH_INTERCOMM_H

#include "comm.h"
#include "group.h"

INTERNAL int create_between(Comm *comm, uint64_t number, const Group *group, Comm **newcomm);
INTERNAL int split_between(Comm *comm, uint64_t number, Choice mine, Comm **newcomm);

#endif
