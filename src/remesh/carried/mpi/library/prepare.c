/* What do the arguments of a collective mean for this rank? Source: MPI 4.1, chapter 6.
 *
 * A rank that neither gives nor takes has no blocks. MPI_IN_PLACE becomes the block of the other buffer that is meant.
 */
#include "prepare.h"

static void begin(Plan *plan, Comm *comm, int kind, int root) {
    *plan = (Plan){.comm = comm, .kind = kind, .root = root};
}

/* MPI_SUCCESS, and whether this process is the one that gives to, or takes from, all. */
static int check_root(const Comm *comm, int root, bool *is_root) {
    if (!comm->remote) {
        if (root < 0 || root >= comm->size)
            return fail(MPI_ERR_ROOT, "root is %d, expected 0 to %d", root, comm->size - 1);
        *is_root = root == comm->rank;
        return MPI_SUCCESS;
    }
    if (root != MPI_ROOT && root != MPI_PROC_NULL && (root < 0 || root >= comm->remote_size))
        return fail(MPI_ERR_ROOT, "root is %d, expected MPI_ROOT, MPI_PROC_NULL or 0 to %d", root,
                    comm->remote_size - 1);
    *is_root = root == MPI_ROOT;
    return MPI_SUCCESS;
}

static int check_plan(Plan *plan) {
    int error = check_blocks(&plan->send);
    if (!error) error = check_blocks(&plan->receive);
    if (error) {
        drop_types(&plan->send);
        drop_types(&plan->receive);
    }
    return error;
}

/* A single block of several. */
static Blocks pick_block(const Blocks *blocks, int i) {
    Block block = block_at(blocks, i);
    return one_block(block.at, block.count, block.type);
}

static bool is_in_place(Blocks blocks) {
    return blocks.buffer == MPI_IN_PLACE;
}

static int only_within(const Comm *comm, const char *what) {
    if (!comm->remote) return MPI_SUCCESS;
    return fail(MPI_ERR_COMM, "comm is an intercommunicator: %s is for one of a single group", what);
}

static int not_in_place(const Comm *comm, Blocks blocks) {
    if (comm->remote && is_in_place(blocks)) return only_within(comm, "MPI_IN_PLACE");
    return MPI_SUCCESS;
}

/* MPI forbids it. MPICH says so of what it sees at once, and so do we; Open MPI lets it pass. */
static int not_aliased(const void *send, const void *receive, int64_t num_bytes) {
#if defined(FACE_OPENMPI)
    return (void)send, (void)receive, (void)num_bytes, MPI_SUCCESS;
#else
    if (send != receive || num_bytes == 0 || send == MPI_BOTTOM) return MPI_SUCCESS;
    return fail(MPI_ERR_BUFFER, "what is sent is where results come, expected MPI_IN_PLACE or another buffer");
#endif
}

static Block own_block(const Comm *comm, const Blocks *blocks) {
    return block_at(blocks, blocks->num == 1 ? 0 : comm->rank);
}

/* The block that this rank gives to itself. */
static int own_not_aliased(const Plan *plan) {
    if (plan->comm->remote || !plan->send.num || !plan->receive.num) return MPI_SUCCESS;
    const Block give = own_block(plan->comm, &plan->send), take = own_block(plan->comm, &plan->receive);
    return take.count ? not_aliased(give.at, take.at, data_bytes(give.type, give.count)) : MPI_SUCCESS;
}

/* ---- Data as they are ---- */

int prepare_barrier(Plan *plan, Comm *comm) {
    begin(plan, comm, KIND_BARRIER, 0);
    /* Between groups nothing is sent, to everybody. */
    if (comm->remote) plan->send = plan->receive = one_block(NULL, 0, datatype_of(MPI_BYTE));
    return MPI_SUCCESS;
}

int prepare_bcast(Plan *plan, Comm *comm, Blocks data, int root) {
    bool is_root;
    TRY(check_root(comm, root, &is_root));
    begin(plan, comm, KIND_BCAST, root);
    if (is_root) plan->send = data;
    else if (root != MPI_PROC_NULL) plan->receive = data;
    return check_plan(plan);
}

int prepare_gather(Plan *plan, Comm *comm, int kind, Blocks send, Blocks receive, int root) {
    bool is_root;
    TRY(check_root(comm, root, &is_root));
    begin(plan, comm, kind, root);
    receive.num = num_peers(comm);
    if (is_root) plan->receive = receive;
    if (is_root && !comm->remote && is_in_place(send)) {
        TRY(check_plan(plan));
        plan->send = pick_block(&receive, comm->rank);
        return check_plan(plan);
    }
    if (!is_root ? root != MPI_PROC_NULL : !comm->remote) plan->send = send;
    TRY(check_plan(plan));
    return own_not_aliased(plan);
}

int prepare_scatter(Plan *plan, Comm *comm, int kind, Blocks send, Blocks receive, int root) {
    bool is_root;
    TRY(check_root(comm, root, &is_root));
    begin(plan, comm, kind, root);
    send.num = num_peers(comm);
    if (is_root) plan->send = send;
    if (is_root && !comm->remote && is_in_place(receive)) {
        TRY(check_plan(plan));
        plan->receive = pick_block(&send, comm->rank);
        plan->discards = true;
        return check_plan(plan);
    }
    if (!is_root ? root != MPI_PROC_NULL : !comm->remote) plan->receive = receive;
    TRY(check_plan(plan));
    return own_not_aliased(plan);
}

int prepare_allgather(Plan *plan, Comm *comm, int kind, Blocks send, Blocks receive) {
    TRY(not_in_place(comm, send));
    begin(plan, comm, kind, 0);
    receive.num = num_peers(comm);
    plan->receive = receive;
    TRY(check_plan(plan));
    plan->send = is_in_place(send) ? pick_block(&receive, comm->rank) : send;
    TRY(check_plan(plan));
    return is_in_place(send) ? MPI_SUCCESS : own_not_aliased(plan);
}

int prepare_alltoall(Plan *plan, Comm *comm, int kind, Blocks send, Blocks receive) {
    TRY(not_in_place(comm, send));
    begin(plan, comm, kind, 0);
    receive.num = send.num = num_peers(comm);
    plan->receive = receive;
    plan->send = is_in_place(send) ? receive : send;
    TRY(check_plan(plan));
    return is_in_place(send) ? MPI_SUCCESS : own_not_aliased(plan);
}

static int take_blocks(TypedBlocks given, int num, Blocks *blocks) {
    *blocks = uneven_blocks(given.buffer, given.counts, given.places, NULL);
    return take_types(blocks, num, given.types);
}

int take_both(Plan *plan, TypedBlocks send, int num_sent, TypedBlocks receive, int num_received) {
    TRY(take_blocks(receive, num_received, &plan->receive));
    int error = take_blocks(send.buffer == MPI_IN_PLACE ? receive : send, num_sent, &plan->send);
    if (error) drop_types(&plan->receive);
    return error ? error : check_plan(plan);
}

int prepare_alltoallw(Plan *plan, Comm *comm, TypedBlocks send, TypedBlocks receive) {
    if (comm->remote && send.buffer == MPI_IN_PLACE) return only_within(comm, "MPI_IN_PLACE");
    begin(plan, comm, KIND_ALLTOALLV, 0);
    TRY(take_both(plan, send, num_peers(comm), receive, num_peers(comm)));
    int error = send.buffer == MPI_IN_PLACE ? MPI_SUCCESS : own_not_aliased(plan);
    if (error) {
        drop_types(&plan->send);
        drop_types(&plan->receive);
    }
    return error;
}

/* ---- Reductions ---- */

static int begin_reduction(Plan *plan, Comm *comm, int kind, int root, const Operands *operands) {
    begin(plan, comm, kind, root);
    plan->op = operands->op;
    return check_reduction(operands->op, operands->type);
}

int prepare_reduce(Plan *plan, Comm *comm, Operands operands, int root) {
    bool is_root;
    TRY(check_root(comm, root, &is_root));
    TRY(begin_reduction(plan, comm, KIND_REDUCE, root, &operands));
    bool is_in_place = is_root && !comm->remote && operands.send == MPI_IN_PLACE;
    /* Between groups the root gives nothing; how much comes it says all the same. */
    plan->send = one_block(is_in_place || (comm->remote && is_root) ? operands.receive : operands.send, operands.count,
                           operands.type);
    if (is_root) plan->receive = one_block(operands.receive, operands.count, operands.type);
    if (root == MPI_PROC_NULL) return MPI_SUCCESS;
    TRY(check_plan(plan));
    return is_in_place ? MPI_SUCCESS : own_not_aliased(plan);
}

int prepare_allreduce(Plan *plan, Comm *comm, int kind, Operands operands) {
    if (kind != KIND_ALLREDUCE) TRY(only_within(comm, "a scan"));
    if (operands.send == MPI_IN_PLACE) TRY(only_within(comm, "MPI_IN_PLACE"));
    TRY(begin_reduction(plan, comm, kind, 0, &operands));
    const void *from = operands.send == MPI_IN_PLACE ? operands.receive : operands.send;
    plan->send = one_block(from, operands.count, operands.type);
    plan->receive = one_block(operands.receive, operands.count, operands.type);
    /* Before the first rank there is nothing, and its buffer stays as it is. */
    plan->discards = kind == KIND_EXSCAN && comm->rank == 0;
    TRY(check_plan(plan));
    return operands.send == MPI_IN_PLACE ? MPI_SUCCESS : own_not_aliased(plan);
}

int prepare_reduce_scatter(Plan *plan, Comm *comm, Operands operands, Counts shares) {
    if (operands.send == MPI_IN_PLACE) TRY(only_within(comm, "MPI_IN_PLACE"));
    TRY(begin_reduction(plan, comm, KIND_REDUCE_SCATTER, 0, &operands));
    plan->shares = shares;
    plan->share = operands.count;
    MPI_Count whole = 0;
    for (int rank = 0; rank < comm->size; rank++) {
        if (share_of(plan, rank) < 0) return fail(MPI_ERR_COUNT, "the count for rank %d is negative", rank);
        whole += share_of(plan, rank);
    }
    const void *from = operands.send == MPI_IN_PLACE ? operands.receive : operands.send;
    plan->send = one_block(from, whole, operands.type);
    plan->receive = one_block(operands.receive, share_of(plan, comm->rank), operands.type);
    TRY(check_plan(plan));
    return operands.send == MPI_IN_PLACE ? MPI_SUCCESS : own_not_aliased(plan);
}
