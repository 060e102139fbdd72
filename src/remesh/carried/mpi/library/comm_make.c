/* Constructors of communicators: how does each get its members and its number? */
#include "channel.h"
#include "comm.h"
#include "exchange.h"
#include "group.h"
#include "info.h"
#include "intercomm.h"
#include "request.h"
#include "shared_memory.h"
#include "topology.h"

/* What is made tells numbers of different constructors apart. */
enum { BY_DUP = 1, BY_CREATE, BY_SPLIT, BY_GROUP };

/* ---- Duplicates ---- */

int copy_comm(Comm *comm, Comm **made) {
    uint64_t number = next_number(comm, BY_DUP);
    if (comm->remote) return make_intercomm(comm->local, number, comm->remote_size, comm->remote, made);
    TRY(make_comm(comm, number, comm->size, comm->world, made));
    (*made)->topology = keep_topology(comm->topology);
    return MPI_SUCCESS;
}

int duplicate_for_library(Comm *comm, Comm **made) {
    return copy_comm(comm, made);
}

int do_Comm_dup(Comm *comm, Comm **newcomm) {
    Comm *copy;
    TRY(copy_comm(comm, &copy));
    int error = copy_attributes(&comm->object, &comm->attributes, &copy->attributes);
    if (error) free_handle(copy);
    else *newcomm = copy;
    return error;
}

int do_Comm_dup_with_info(Comm *comm, Info *info, Comm **newcomm) {
    TRY(do_Comm_dup(comm, newcomm));
    (*newcomm)->info = copy_info(info);
    return MPI_SUCCESS;
}

/* No message is needed, so it is over at once. */
int do_Comm_idup(Comm *comm, Comm **newcomm, Request **request) {
    TRY(do_Comm_dup(comm, newcomm));
    *request = make_request(comm, 0);
    return MPI_SUCCESS;
}

int do_Comm_idup_with_info(Comm *comm, Info *info, Comm **newcomm, Request **request) {
    TRY(do_Comm_dup_with_info(comm, info, newcomm));
    *request = make_request(comm, 0);
    return MPI_SUCCESS;
}

/* ---- Groups ---- */

static int expect_members(const Comm *comm, const Group *group) {
    for (int rank = 0; rank < group->size; rank++) {
        bool is_member = rank_of_peer(comm->remote ? comm->local : comm, group->world[rank]) != MPI_ANY_SOURCE;
        if (!is_member) return fail(MPI_ERR_GROUP, "rank %d of the group is none of the communicator's", rank);
    }
    return MPI_SUCCESS;
}

static int make_of_group(Comm *comm, uint64_t number, const Group *group, Comm **made) {
    *made = NULL;
    if (rank_in_group(group, process.rank) == MPI_UNDEFINED) return MPI_SUCCESS;
    return make_comm(comm, number, group->size, group->world, made);
}

int do_Comm_create(Comm *comm, Group *group, Comm **newcomm) {
    TRY(expect_members(comm, group));
    uint64_t number = next_number(comm, BY_CREATE);
    if (comm->remote) return create_between(comm, number, group, newcomm);
    /* Disjoint groups may call this at once, each for a communicator of its own. */
    return make_of_group(comm, mix_numbers(number, number_of_ranks(group->size, group->world)), group, newcomm);
}

static int create_group(Comm *comm, const Group *group, uint64_t tag, Comm **newcomm) {
    uint64_t key = mix_numbers(mix_numbers(number_of_ranks(group->size, group->world), tag), BY_GROUP);
    uint64_t number = mix_numbers(mix_numbers(comm->number, key), (uint64_t)next_of_group(comm, key));
    return make_of_group(comm, number, group, newcomm);
}

int do_Comm_create_group(Comm *comm, Group *group, int tag, Comm **newcomm) {
    if (comm->remote) return fail(MPI_ERR_COMM, "comm is an intercommunicator, expected one of a single group");
    TRY(expect_members(comm, group));
    return create_group(comm, group, (uint64_t)tag, newcomm);
}

int do_Comm_create_from_group(Group *group, const char *stringtag, Info *info, Errhandler *errhandler, Comm **newcomm) {
    TRY(create_group(comm_world(), group, number_of_text(stringtag), newcomm));
    if (!*newcomm) return MPI_SUCCESS;
    (*newcomm)->info = copy_info(info);
    let_go((*newcomm)->object.errhandler);
    (*newcomm)->object.errhandler = (Errhandler *)errhandler;
    keep(errhandler);
    return MPI_SUCCESS;
}

/* ---- Splits ---- */

static int compare_choices(const void *one, const void *two) {
    const Choice *first = one, *second = two;
    if (first->key != second->key) return first->key < second->key ? -1 : 1;
    return (first->rank > second->rank) - (first->rank < second->rank);
}

int pick_members(Choice *choices, int count, int64_t color, const int *world, int **picked) {
    int num = 0;
    for (int i = 0; i < count; i++)
        if (choices[i].color == color) choices[num++] = choices[i];
    qsort(choices, (size_t)num, sizeof *choices, compare_choices);
    *picked = NEW_ARRAY(int, num);
    for (int i = 0; i < num; i++) (*picked)[i] = world[choices[i].rank];
    return num;
}

/* The part of an intracommunicator that gave this color; MPI_COMM_NULL for those with MPI_UNDEFINED. */
static int split(Comm *comm, int64_t color, int key, Comm **newcomm) {
    uint64_t number = mix_numbers(next_number(comm, BY_SPLIT), (uint64_t)color);
    Choice mine = {color, key, comm->rank}, *all = NEW_ARRAY(Choice, comm->size);
    int error = gather_all(comm, &mine, sizeof mine, all);
    *newcomm = NULL;
    if (!error && color != MPI_UNDEFINED) {
        int *members, num = pick_members(all, comm->size, color, comm->world, &members);
        error = make_comm(comm, number, num, members, newcomm);
        free(members);
    }
    free(all);
    return error;
}

int do_Comm_split(Comm *comm, int color, int key, Comm **newcomm) {
    if (color < 0 && color != MPI_UNDEFINED)
        return fail(MPI_ERR_ARG, "color is %d, expected 0 or more, or MPI_UNDEFINED", color);
    Choice mine = {color, key, comm->rank};
    if (comm->remote) return split_between(comm, next_number(comm, BY_SPLIT), mine, newcomm);
    return split(comm, color, key, newcomm);
}

#define RESOURCE "mpi_hw_resource_type"

/* Those of a host have one color, in both groups of an intercommunicator. */
static int find_color_of_host(Comm *comm, int64_t *color) {
    Comm *own = comm->remote ? comm->local : comm;
    uint64_t *hosts = NEW_ARRAY(uint64_t, own->size);
    int error = gather_hosts(own, hosts);
    *color = (int64_t)(hosts[own->rank] >> 1);
    free(hosts);
    return error;
}

/* Ranks of one host together: those that can share memory. A restart may part them until they do. No other resource of
 * a host is told apart: a guided split by one, and an unguided one, give MPI_COMM_NULL.
 */
int do_Comm_split_type(Comm *comm, int split_type, int key, Info *info, Comm **newcomm) {
    bool is_shared = split_type == MPI_COMM_TYPE_SHARED, is_guided = split_type == MPI_COMM_TYPE_HW_GUIDED;
#ifdef MPI_COMM_TYPE_RESOURCE_GUIDED
    is_guided = is_guided || split_type == MPI_COMM_TYPE_RESOURCE_GUIDED;
#endif
    if (!is_shared && !is_guided && split_type != MPI_COMM_TYPE_HW_UNGUIDED && split_type != MPI_UNDEFINED)
        return fail(MPI_ERR_ARG, "split_type is %d: hosts are told apart, and nothing within them", split_type);
    const char *wanted = is_guided ? info_value(info, RESOURCE) : NULL;
    if (wanted && !strcmp(wanted, "mpi_shared_memory")) is_shared = true;
    int64_t color;
    TRY(find_color_of_host(comm, &color));
    if (!is_shared) color = MPI_UNDEFINED;
    if (comm->remote) return split_between(comm, next_number(comm, BY_SPLIT), (Choice){color, key, comm->rank}, newcomm);
    return split(comm, color, key, newcomm);
}
