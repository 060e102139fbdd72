/* Communicators: a number, members, and what the program hangs on them. */
#ifndef REMESH_COMM_H
#define REMESH_COMM_H

#include "attributes.h"
#include "core.h"

/* Where a world rank stands among the peers. */
typedef struct {
    int world, rank;
} Peer;

struct Comm {
    Object object;
    uint64_t number;      /* the same on all members, 0 is the world; that of MPI_COMM_SELF differs from rank to rank */
    int rank, size;       /* of the (local) group */
    int *world;           /* world rank of each member of the (local) group */
    int remote_size;
    int *remote;          /* world ranks of an intercommunicator's remote group; NULL: an intracommunicator */
    struct Comm *local;   /* of an intercommunicator: the local group's own communicator */
    Peer *by_world;       /* the peers by world rank; NULL if both ranks of each are the same */
    int num_made;         /* constructors that have run on it */
    struct MadeOfGroup *made_of_group; /* and those that only some of its members have run */
    _Atomic uint32_t num_hidden;       /* collectives of the library's own that have run on its hidden number */
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
/* A tag for the next collective on the hidden number, and one more: the same on all members, who begin them in one
 * order. So rounds of two that are under way do not meet.
 */
INTERNAL int next_tag(Comm *comm);
/* Numbers of what is made without a message: they follow from what all who make it know.
 * A number of 62 bits for what is made from `parent` as the next thing; the same on all who call it in the same order.
 */
INTERNAL uint64_t next_number(Comm *parent, uint64_t more);
INTERNAL uint64_t mix_numbers(uint64_t first, uint64_t second);
INTERNAL uint64_t number_of_ranks(int count, const int *world_ranks);
INTERNAL uint64_t number_of_text(const char *text);
/* How many were made from `parent` for such a key, which only some members know, this one included. */
INTERNAL int next_of_group(Comm *parent, uint64_t key);
INTERNAL void forget_made_of_group(Comm *comm);
/* An intracommunicator of these world ranks, of which this process is one; the lower half is told. Copies `world`. */
INTERNAL int make_comm(Comm *parent, uint64_t number, int size, const int *world, Comm **made);
/* An intercommunicator between the groups of `local`, which it keeps for what concerns this group alone, and others. */
INTERNAL int make_intercomm(Comm *local, uint64_t number, int size, const int *remote, Comm **made);
/* A copy with another number: members and topology, nothing that the program has hung on it. */
INTERNAL int copy_comm(Comm *comm, Comm **made);
/* What a member says in a split. */
typedef struct {
    int64_t color;
    int key, rank;
} Choice;
/* World ranks of those who gave this color, in order of key and rank; how many. `choices` is used up. */
INTERNAL int pick_members(Choice *choices, int count, int64_t color, const int *world, int **picked);
/* A duplicate that only the library uses: of a window, of a file. No attributes are copied. */
INTERNAL int duplicate_for_library(Comm *comm, Comm **made);
INTERNAL Comm *comm_world(void);
INTERNAL Comm *comm_self(void);
/* Makes what is behind the predefined handles, when the library is loaded. */
INTERNAL void make_predefined_comms(void);
/* MPI starts: the process knows its rank and the number of ranks. */
INTERNAL int begin_comms(void);
/* Tells the lower half of MPI_COMM_SELF, the communicator that this process makes whenever it begins. */
INTERNAL int tell_of_self(void);
/* MPI ends: attributes of MPI_COMM_SELF are deleted first. Source: MPI 4.1, section 11.2.4. */
INTERNAL int end_comms(void);

#endif
