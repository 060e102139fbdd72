/* Communicators: which there are, who is in them, and what a program may ask about them.
 */
#include "comm.h"
#include "channel.h"
#include "entry.h"
#include "group.h"
#include "info.h"
#include "topology.h"

static Comm *the_world, *the_self;

Comm *comm_world(void) { return the_world; }
Comm *comm_self(void) { return the_self; }

/* ---- Members ---- */

static int compare_peers(const void *one, const void *two) {
    int first = ((const Peer *)one)->world, second = ((const Peer *)two)->world;
    return (first > second) - (first < second);
}

static void index_peers(Comm *comm) {
    int num = num_peers(comm);
    bool is_same = true;
    for (int rank = 0; rank < num && is_same; rank++) is_same = peer_of(comm, rank) == rank;
    if (is_same) return;
    comm->by_world = NEW_ARRAY(Peer, num);
    for (int rank = 0; rank < num; rank++) comm->by_world[rank] = (Peer){peer_of(comm, rank), rank};
    qsort(comm->by_world, (size_t)num, sizeof(Peer), compare_peers);
}

int rank_of_peer(const Comm *comm, int world) {
    int num = num_peers(comm);
    if (!comm->by_world) return world >= 0 && world < num ? world : MPI_ANY_SOURCE;
    Peer wanted = {world, 0};
    const Peer *found = bsearch(&wanted, comm->by_world, (size_t)num, sizeof(Peer), compare_peers);
    return found ? found->rank : MPI_ANY_SOURCE;
}

static int *copy_ranks(int count, const int *ranks) {
    int *copy = NEW_ARRAY(int, count);
    memcpy(copy, ranks, sizeof *ranks * (size_t)count);
    return copy;
}

static void set_members(Comm *comm, uint64_t number, int size, const int *world) {
    comm->number = number;
    comm->size = size;
    comm->world = copy_ranks(size, world);
    comm->rank = MPI_UNDEFINED;
    for (int rank = 0; rank < size; rank++)
        if (world[rank] == process.rank) comm->rank = rank;
}

static void inherit(Comm *comm, const Comm *parent) {
    comm->object.errhandler = parent->object.errhandler;
    if (comm->object.errhandler) keep(comm->object.errhandler);
}

int make_comm(Comm *parent, uint64_t number, int size, const int *world, Comm **made) {
    TRY(lower_make_communicator(number, size, world));
    Comm *comm = make_object(KIND_COMM, sizeof *comm);
    set_members(comm, number, size, world);
    index_peers(comm);
    inherit(comm, parent);
    *made = comm;
    return MPI_SUCCESS;
}

int make_intercomm(Comm *local, uint64_t number, int size, const int *remote, Comm **made) {
    int lowest = local->world[0];
    for (int rank = 1; rank < local->size; rank++)
        if (local->world[rank] < lowest) lowest = local->world[rank];
    Comm *own;
    TRY(make_comm(local, mix_numbers(number, (uint64_t)lowest), local->size, local->world, &own));
    Comm *comm = make_object(KIND_COMM, sizeof *comm);
    set_members(comm, number, local->size, local->world);
    comm->remote_size = size;
    comm->remote = copy_ranks(size, remote);
    comm->local = own;
    index_peers(comm);
    inherit(comm, local);
    *made = comm;
    return MPI_SUCCESS;
}

/* The last reference is gone. No operation is under way on it: each keeps its communicator. */
static void destroy_comm(void *object) {
    Comm *comm = object;
    if (!comm->remote && is_running()) lower_free_communicator(comm->number);
    forget_made_of_group(comm);
    drop_topology(comm->topology);
    let_go(comm->local);
    let_go(comm->info);
    free(comm->by_world);
    free(comm->remote);
    free(comm->world);
}

/* ---- Start and end ---- */

static Comm *predefined_comm(MPI_Comm handle, const char *name) {
    Comm *comm = make_predefined(KIND_COMM, sizeof *comm, BITS(handle));
    snprintf(comm->name, sizeof comm->name, "%s", name);
    return comm;
}

void make_predefined_comms(void) {
    set_destructor(KIND_COMM, destroy_comm);
    the_world = predefined_comm(MPI_COMM_WORLD, "MPI_COMM_WORLD");
    the_self = predefined_comm(MPI_COMM_SELF, "MPI_COMM_SELF");
}

int begin_comms(void) {
    int *everybody = NEW_ARRAY(int, process.size);
    for (int rank = 0; rank < process.size; rank++) everybody[rank] = rank;
    set_members(the_world, 0, process.size, everybody);
    free(everybody);
    /* No other rank ever hears its number: it may be one that no other communicator has. */
    set_members(the_self, mix_numbers(number_of_text("self"), (uint64_t)process.rank), 1, &process.rank);
    index_peers(the_self);
    return tell_of_self();
}

int tell_of_self(void) { return lower_make_communicator(the_self->number, 1, &process.rank); }

int end_comms(void) {
    TRY(delete_attributes(&the_self->object, &the_self->attributes));
    return delete_attributes(&the_world->object, &the_world->attributes);
}

/* ---- What a program asks ---- */

int do_Comm_rank(Comm *comm, int *rank) {
    *rank = comm->rank;
    return MPI_SUCCESS;
}

int do_Comm_size(Comm *comm, int *size) {
    *size = comm->size;
    return MPI_SUCCESS;
}

int do_Comm_group(Comm *comm, Group **group) {
    *group = make_group(comm->size, comm->world);
    return MPI_SUCCESS;
}

int do_Comm_test_inter(Comm *comm, int *flag) {
    *flag = comm->remote != NULL;
    return MPI_SUCCESS;
}

static int compare_numbers(const void *one, const void *two) {
    int first = *(const int *)one, second = *(const int *)two;
    return (first > second) - (first < second);
}

/* MPI_IDENT if the same members stand in the same order, MPI_SIMILAR if in another. */
static int compare_members(int count, const int *one, int other_count, const int *two) {
    if (count != other_count) return MPI_UNEQUAL;
    size_t num_bytes = sizeof *one * (size_t)count;
    if (!memcmp(one, two, num_bytes)) return MPI_IDENT;
    int *first = copy_ranks(count, one), *second = copy_ranks(count, two);
    qsort(first, (size_t)count, sizeof *first, compare_numbers);
    qsort(second, (size_t)count, sizeof *second, compare_numbers);
    bool is_similar = !memcmp(first, second, num_bytes);
    free(first);
    free(second);
    return is_similar ? MPI_SIMILAR : MPI_UNEQUAL;
}

int do_Comm_compare(Comm *comm1, Comm *comm2, int *result) {
    if (comm1 == comm2) {
        *result = MPI_IDENT;
        return MPI_SUCCESS;
    }
    if (!comm1->remote != !comm2->remote) {
        *result = MPI_UNEQUAL;
        return MPI_SUCCESS;
    }
    int ours = compare_members(comm1->size, comm1->world, comm2->size, comm2->world), theirs = MPI_IDENT;
    if (comm1->remote) theirs = compare_members(comm1->remote_size, comm1->remote, comm2->remote_size, comm2->remote);
    if (ours == MPI_UNEQUAL || theirs == MPI_UNEQUAL) *result = MPI_UNEQUAL;
    else *result = ours == MPI_IDENT && theirs == MPI_IDENT ? MPI_CONGRUENT : MPI_SIMILAR;
    return MPI_SUCCESS;
}

int do_Comm_set_name(Comm *comm, const char *comm_name) {
    snprintf(comm->name, sizeof comm->name, "%s", comm_name);
    return MPI_SUCCESS;
}

int do_Comm_get_name(Comm *comm, char *comm_name, int *resultlen) {
    *resultlen = sprintf(comm_name, "%s", comm ? comm->name : "MPI_COMM_NULL");
    return MPI_SUCCESS;
}

int do_Comm_set_info(Comm *comm, Info *info) {
    update_info(&comm->info, info);
    return MPI_SUCCESS;
}

int do_Comm_get_info(Comm *comm, Info **info_used) {
    *info_used = copy_info(comm->info);
    return MPI_SUCCESS;
}

int do_Comm_free(MPI_Comm *comm) {
    Comm *freed = comm_of(*comm);
    if (!freed) return fail(MPI_ERR_COMM, "comm is no communicator");
    if (freed->object.is_predefined) return fail(MPI_ERR_COMM, "%s cannot be freed", freed->name);
    TRY(delete_attributes(&freed->object, &freed->attributes));
    free_handle(freed);
    *comm = MPI_COMM_NULL;
    return MPI_SUCCESS;
}

int do_Comm_disconnect(MPI_Comm *comm) {
    return do_Comm_free(comm);
}

/* No process was there before the others. */
int do_Comm_get_parent(Comm **parent) {
    *parent = NULL;
    return MPI_SUCCESS;
}
