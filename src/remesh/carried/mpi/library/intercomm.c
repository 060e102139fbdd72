/* Intercommunicators: how do two groups learn of each other, and what becomes of them?
 *
 * What one group has to say to the other goes from leader to leader, and from there to all: see swap_groups().
 */
#include "intercomm.h"
#include "channel.h"
#include "exchange.h"
#include "info.h"

enum { BY_INTERCOMM = 16, BY_MERGE, BETWEEN_LEADERS, OF_GROUPS };

int do_Comm_remote_size(Comm *comm, int *size) {
    if (!comm->remote) return fail(MPI_ERR_COMM, "comm has a single group, expected an intercommunicator");
    *size = comm->remote_size;
    return MPI_SUCCESS;
}

int do_Comm_remote_group(Comm *comm, Group **group) {
    if (!comm->remote) return fail(MPI_ERR_COMM, "comm has a single group, expected an intercommunicator");
    *group = make_group(comm->remote_size, comm->remote);
    return MPI_SUCCESS;
}

/* ---- Two groups become one intercommunicator ---- */

/* What a leader tells, first to the other leader and then to its own group; the members' world ranks follow. */
typedef struct {
    uint64_t number;
    int32_t error, size;
} Introduction;

static int expect_apart(const Comm *local, int size, const int *remote) {
    for (int rank = 0; rank < size; rank++)
        if (rank_of_peer(local, remote[rank]) != MPI_ANY_SOURCE)
            return fail(MPI_ERR_COMM, "the two groups have rank %d of MPI_COMM_WORLD in common", remote[rank]);
    return MPI_SUCCESS;
}

/* Between leaders: the other group. On an error `theirs->error` says which, and there are no ranks. */
static void introduce(Comm *local, Comm *peer, int remote_leader, int tag, Introduction *mine, Introduction *theirs,
                      int **remote) {
    int error = MPI_SUCCESS;
    if (!peer) error = fail(MPI_ERR_COMM, "peer_comm is no communicator");
    else if (remote_leader < 0 || remote_leader >= num_peers(peer))
        error = fail(MPI_ERR_RANK, "remote_leader is %d of %d ranks of peer_comm", remote_leader, num_peers(peer));
    else {
        /* A number of its own: the tag is the program's and might be one of the library's. */
        uint64_t number = mix_numbers(peer->number, BETWEEN_LEADERS);
        int world = peer_of(peer, remote_leader);
        error = swap_with(number, world, tag, (Bytes){mine, sizeof *mine}, (Bytes){theirs, sizeof *theirs});
        if (!error) {
            *remote = NEW_ARRAY(int, theirs->size);
            Bytes ours = {local->world, (int64_t)sizeof(int) * local->size};
            error = swap_with(number, world, tag, ours, (Bytes){*remote, (int64_t)sizeof(int) * theirs->size});
        }
    }
    theirs->error = error;
}

int do_Intercomm_create(Comm *local_comm, int local_leader, Comm *peer_comm, int remote_leader, int tag,
                        Comm **newintercomm) {
    if (local_comm->remote) return fail(MPI_ERR_COMM, "local_comm is an intercommunicator");
    if (local_leader < 0 || local_leader >= local_comm->size)
        return fail(MPI_ERR_RANK, "local_leader is %d of %d ranks", local_leader, local_comm->size);
    Introduction mine = {next_number(local_comm, BY_INTERCOMM), 0, local_comm->size}, theirs = {0};
    int *remote = NULL;
    if (local_comm->rank == local_leader)
        introduce(local_comm, peer_comm, remote_leader, tag, &mine, &theirs, &remote);
    int error = broadcast(local_comm, local_leader, &theirs, sizeof theirs);
    if (!error && theirs.error && local_comm->rank != local_leader)
        error = fail(theirs.error, "local_leader could not reach the other group");
    if (!error) error = theirs.error;
    if (!error) {
        if (!remote) remote = NEW_ARRAY(int, theirs.size);
        error = broadcast(local_comm, local_leader, remote, (int64_t)sizeof(int) * theirs.size);
    }
    if (!error) error = expect_apart(local_comm, theirs.size, remote);
    if (!error) {
        bool is_first = mine.number < theirs.number;
        uint64_t number = mix_numbers(is_first ? mine.number : theirs.number, is_first ? theirs.number : mine.number);
        error = make_intercomm(local_comm, number, theirs.size, remote, newintercomm);
    }
    free(remote);
    return error;
}

/* Two groups that need not come from communicators; only the leader of a group needs to know the other one. */
int do_Intercomm_create_from_groups(Group *local_group, int local_leader, Group *remote_group, int remote_leader,
                                    const char *stringtag, Info *info, Errhandler *errhandler, Comm **newintercomm) {
    (void)remote_leader;
    if (local_leader < 0 || local_leader >= local_group->size)
        return fail(MPI_ERR_RANK, "local_leader is %d of %d ranks", local_leader, local_group->size);
    Comm *local;
    TRY(do_Comm_create_from_group(local_group, stringtag, info, errhandler, &local));
    if (!local) return fail(MPI_ERR_GROUP, "this process is not in local_group");
    bool is_leader = local->rank == local_leader;
    int size = is_leader && remote_group ? remote_group->size : 0;
    int error = broadcast(local, local_leader, &size, sizeof size);
    if (!error && !size) error = fail(MPI_ERR_GROUP, "remote_group of the leader is no group, or empty");
    int *remote = NEW_ARRAY(int, size);
    if (!error && is_leader) memcpy(remote, remote_group->world, sizeof(int) * (size_t)size);
    if (!error) error = broadcast(local, local_leader, remote, (int64_t)sizeof(int) * size);
    if (!error) error = expect_apart(local, size, remote);
    if (!error) {
        uint64_t one = number_of_ranks(local->size, local->world), two = number_of_ranks(size, remote);
        uint64_t pair = mix_numbers(one < two ? one : two, one < two ? two : one);
        uint64_t key = mix_numbers(mix_numbers(pair, number_of_text(stringtag)), OF_GROUPS);
        uint64_t number = mix_numbers(key, (uint64_t)next_of_group(comm_world(), key));
        error = make_intercomm(local, number, size, remote, newintercomm);
        if (!error) (*newintercomm)->info = copy_info(info);
    }
    free(remote);
    free_handle(local);
    return error;
}

/* ---- What is made of an intercommunicator ---- */

int do_Intercomm_merge(Comm *intercomm, int high, Comm **newintracomm) {
    if (!intercomm->remote) return fail(MPI_ERR_COMM, "intercomm has a single group");
    int32_t mine = high != 0, *theirs;
    int64_t num_bytes;
    TRY(swap_groups(intercomm, (Bytes){&mine, sizeof mine}, (void **)&theirs, &num_bytes));
    /* If both say the same, the group whose first member comes first in the world leads: the same on both sides. */
    bool is_first = mine == *theirs ? intercomm->world[0] < intercomm->remote[0] : !mine;
    free(theirs);
    int ours = intercomm->size, num = ours + intercomm->remote_size, *all = NEW_ARRAY(int, num);
    memcpy(all + (is_first ? 0 : intercomm->remote_size), intercomm->world, sizeof(int) * (size_t)ours);
    memcpy(all + (is_first ? ours : 0), intercomm->remote, sizeof(int) * (size_t)intercomm->remote_size);
    int error = make_comm(intercomm, next_number(intercomm, BY_MERGE), num, all, newintracomm);
    free(all);
    return error;
}

/* The intercommunicator between a part of this group, of which this process is one, and a part of the other. */
static int join_parts(Comm *comm, uint64_t number, Bytes ours, Bytes theirs, Comm **newcomm) {
    int num_ours = (int)(ours.num_bytes / (int64_t)sizeof(int));
    int num_theirs = (int)(theirs.num_bytes / (int64_t)sizeof(int));
    Comm *local;
    uint64_t part = mix_numbers(number, number_of_ranks(num_ours, ours.at));
    TRY(make_comm(comm, part, num_ours, ours.at, &local));
    int error = make_intercomm(local, number, num_theirs, theirs.at, newcomm);
    free_handle(local);
    return error;
}

int create_between(Comm *comm, uint64_t number, const Group *group, Comm **newcomm) {
    Bytes ours = {group->world, (int64_t)sizeof(int) * group->size}, theirs;
    void *remote;
    TRY(swap_groups(comm, ours, &remote, &theirs.num_bytes));
    theirs.at = remote;
    *newcomm = NULL;
    int error = MPI_SUCCESS;
    if (theirs.num_bytes && rank_in_group(group, process.rank) != MPI_UNDEFINED)
        error = join_parts(comm, number, ours, theirs, newcomm);
    free(remote);
    return error;
}

int split_between(Comm *comm, uint64_t number, Choice mine, Comm **newcomm) {
    *newcomm = NULL;
    Choice *ours = NEW_ARRAY(Choice, comm->size);
    void *theirs = NULL;
    int64_t num_bytes;
    int error = gather_all(comm->local, &mine, sizeof mine, ours);
    if (!error) error = swap_groups(comm, (Bytes){ours, (int64_t)sizeof *ours * comm->size}, &theirs, &num_bytes);
    if (!error && mine.color != MPI_UNDEFINED) {
        int *local, *remote;
        int num_local = pick_members(ours, comm->size, mine.color, comm->world, &local);
        int num_remote = pick_members(theirs, comm->remote_size, mine.color, comm->remote, &remote);
        Bytes part = {local, (int64_t)sizeof(int) * num_local}, other = {remote, (int64_t)sizeof(int) * num_remote};
        if (num_remote) error = join_parts(comm, mix_numbers(number, (uint64_t)mine.color), part, other, newcomm);
        free(local);
        free(remote);
    }
    free(theirs);
    free(ours);
    return error;
}
