/* Communicators: a number, members, and what the program hangs on them. */
#ifndef REMESH_COMM_H
#define REMESH_COMM_H

#include "attributes.h"
#include "core.h"

struct Comm {
    Object object;
    uint64_t number;      /* the same on all members; 0 is the world, 1 is self: see comm.c */
    int rank, size;       /* of the (local) group */
    int *world;           /* world rank of each member of the (local) group */
    int remote_size;      /* 0: an intracommunicator */
    int *remote;          /* world ranks of an intercommunicator's remote group */
    struct Comm *local;   /* of an intercommunicator: the local group's own communicator */
    int num_made;         /* constructors that have run on it */
    struct Topology *topology; /* topology.h; NULL */
    Attributes attributes;
    Info *info;
    char name[MPI_MAX_OBJECT_NAME];
    struct BufferedSends *buffer; /* MPI_Comm_attach_buffer */
};

/* The number under which the library's own messages run on it, apart from the program's. */
static inline uint64_t hidden_number(const Comm *comm) { return comm->number | (uint64_t)1 << 62; }
/* Those that point-to-point calls and collectives speak to: the remote group of an intercommunicator. */
static inline int num_peers(const Comm *comm) { return comm->remote ? comm->remote_size : comm->size; }
static inline int peer_of(const Comm *comm, int rank) { return comm->remote ? comm->remote[rank] : comm->world[rank]; }
/* Rank of a world rank among the peers; MPI_ANY_SOURCE if it is none. */
INTERNAL int rank_of_peer(const Comm *comm, int world);
/* A number of 62 bits for what is made from `parent` as the next thing; the same on all who call it in the same order. */
INTERNAL uint64_t next_number(Comm *parent, uint64_t more);
INTERNAL uint64_t mix_numbers(uint64_t first, uint64_t second);
/* An intracommunicator of these world ranks, of which this process is one; the lower half is told. Copies `world`. */
INTERNAL int make_comm(Comm *parent, uint64_t number, int size, const int *world, Comm **made);
/* A duplicate that only the library uses: of a window, of a file. No attributes are copied. */
INTERNAL int duplicate_for_library(Comm *comm, Comm **made);
INTERNAL Comm *comm_world(void);
INTERNAL Comm *comm_self(void);
/* Makes what is behind the predefined handles, when the library is loaded. */
INTERNAL void make_predefined_comms(void);
/* MPI starts: the process knows its rank and the number of ranks. */
INTERNAL int begin_comms(void);
/* MPI ends: attributes of MPI_COMM_SELF are deleted first. Source: MPI 4.1, section 11.2.4. */
INTERNAL int end_comms(void);

#endif
