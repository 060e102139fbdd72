/* Reductions that the real MPI cannot do: a program's own operations, and all between groups.
 *
 * Operands are folded up a binomial tree to rank 0 of the group: a rank with those of ranks r to s-1 takes those of s
 * to t-1 and folds both, so the order of ranks is kept and no rank holds more than two of them. What comes out goes on:
 *
 *     reduce            rank 0 ──> root
 *     allreduce         rank 0 ──> all, down the same tree
 *     reduce_scatter    rank 0 ──> its share to each
 *
 * Between groups the two ranks 0 swap what came out first, or it goes to the root alone. A scan doubles instead: rank r
 * meets r xor 1, 2, 4, ... and both learn what the operands of the other's side fold to. Packed data are folded.
 */
#include "collective.h"

typedef enum { UP, TO_ROOT, ACROSS, DOWN, SHARES, DOUBLING, OVER } Stage;

typedef struct Fold {
    Stage stage;
    int tag, mask;
    bool has_come;     /* in `incoming`, and is to be folded */
    bool has_result;   /* of an exscan: something has come from below */
    int64_t num_bytes; /* of an operand */
    char *result;      /* what this rank has: in a tree the fold so far */
    char *incoming;
    char *side;        /* of a scan: what all operands of this rank's side fold to */
} Fold;

void drop_fold(Fold *fold) {
    if (!fold) return;
    free(fold->result);
    free(fold->incoming);
    free(fold->side);
    free(fold);
}

int num_fold_steps(const Plan *plan) {
    enum { MOST_CHILDREN = 32 };
    bool shares = plan->kind == KIND_REDUCE_SCATTER && plan->comm->rank == 0 && plan->comm->size > MOST_CHILDREN;
    return shares ? plan->comm->size : MOST_CHILDREN;
}

/* ---- Messages ---- */

static void clear_steps(Request *request) {
    memset(request->steps, 0, sizeof *request->steps * (size_t)request->num_steps);
}

static int give(Request *request, int step, int world, const void *data, int64_t num_bytes) {
    const Running *running = request->state;
    uint64_t number = hidden_number(running->plan.comm);
    return lower_send(0, number, world, running->fold->tag, data, num_bytes, &request->steps[step].operation);
}

static int take(Request *request, int step, int world, void *at, int64_t num_bytes) {
    const Running *running = request->state;
    Operation *operation = &request->steps[step].operation;
    operation->at = at;
    operation->room = num_bytes;
    return lower_receive(0, hidden_number(running->plan.comm), world, running->fold->tag, operation);
}

/* ---- Stages: each starts its messages and names the next one ---- */

/* second = first op second, in this order. */
static void fold_before(const Plan *plan, const char *first, char *second) {
    fold(plan->op, plan->send.type, plan->send.count, first, second);
}

/* first = first op second; both buffers change hands. */
static void fold_behind(const Plan *plan, char **first, char **second) {
    fold_before(plan, *first, *second);
    char *folded = *second;
    *second = *first;
    *first = folded;
}

/* The stage after the group's operands have been folded at its rank 0. */
static Stage after_up(const Plan *plan) {
    if (plan->kind == KIND_REDUCE) return TO_ROOT;
    if (plan->comm->remote) return ACROSS;
    return plan->kind == KIND_ALLREDUCE ? DOWN : SHARES;
}

static int go_up(Request *request, const Plan *plan, Fold *fold) {
    const Comm *comm = plan->comm;
    if (fold->has_come) {
        fold_behind(plan, &fold->result, &fold->incoming);
        fold->has_come = false;
        fold->mask <<= 1;
    }
    for (; fold->mask < comm->size; fold->mask <<= 1) {
        if (comm->rank & fold->mask) {
            fold->stage = after_up(plan);
            return give(request, 0, comm->world[comm->rank - fold->mask], fold->result, fold->num_bytes);
        }
        if (comm->rank + fold->mask < comm->size) {
            fold->has_come = true;
            return take(request, 0, comm->world[comm->rank + fold->mask], fold->incoming, fold->num_bytes);
        }
    }
    fold->stage = after_up(plan);
    return MPI_SUCCESS;
}

static int go_to_root(Request *request, const Plan *plan, Fold *fold) {
    const Comm *comm = plan->comm;
    fold->stage = OVER;
    if (plan->root == MPI_ROOT && comm->remote) return take(request, 0, comm->remote[0], fold->result, fold->num_bytes);
    int root = peer_of(comm, plan->root);
    if (comm->rank == 0 && root != process.rank) return give(request, 0, root, fold->result, fold->num_bytes);
    if (comm->rank != 0 && root == process.rank) return take(request, 0, comm->world[0], fold->result, fold->num_bytes);
    return MPI_SUCCESS;
}

/* Between groups: the ranks 0 swap what came out; it is in `incoming` then. */
static int go_across(Request *request, const Plan *plan, Fold *fold) {
    const Comm *comm = plan->comm;
    if (comm->rank != 0 || fold->has_come) {
        if (fold->has_come) memcpy(fold->result, fold->incoming, (size_t)fold->num_bytes);
        fold->stage = plan->kind == KIND_ALLREDUCE ? DOWN : SHARES;
        fold->has_come = false;
        return MPI_SUCCESS;
    }
    fold->has_come = true;
    TRY(take(request, 0, comm->remote[0], fold->incoming, fold->num_bytes));
    return give(request, 1, comm->remote[0], fold->result, fold->num_bytes);
}

static int go_down(Request *request, const Plan *plan, Fold *fold) {
    const Comm *comm = plan->comm;
    int lowest = comm->rank & -comm->rank, step = 0;
    if (comm->rank != 0 && !fold->has_come) {
        fold->has_come = true;
        return take(request, 0, comm->world[comm->rank - lowest], fold->result, fold->num_bytes);
    }
    fold->stage = OVER;
    for (int mask = 1; (comm->rank == 0 || mask < lowest) && mask < comm->size - comm->rank; mask <<= 1)
        TRY(give(request, step++, comm->world[comm->rank + mask], fold->result, fold->num_bytes));
    return MPI_SUCCESS;
}

/* Rank 0 gives each its share; where it stands is the same on all. */
static int go_share(Request *request, const Plan *plan, Fold *fold) {
    const Comm *comm = plan->comm;
    fold->stage = OVER;
    if (comm->rank != 0)
        return take(request, 0, comm->world[0], fold->result, data_bytes(plan->send.type, own_count(plan)));
    const char *at = fold->result;
    for (int rank = 0; rank < comm->size; rank++) {
        int64_t num_bytes = data_bytes(plan->send.type, share_of(plan, rank));
        if (rank) TRY(give(request, rank - 1, comm->world[rank], at, num_bytes));
        at += num_bytes;
    }
    return MPI_SUCCESS;
}

static void fold_side(const Plan *plan, Fold *fold) {
    bool is_below = (plan->comm->rank & fold->mask) != 0; /* what has come is of lower ranks */
    if (!is_below) {
        fold_behind(plan, &fold->side, &fold->incoming);
        return;
    }
    if (fold->has_result) fold_before(plan, fold->incoming, fold->result);
    else memcpy(fold->result, fold->incoming, (size_t)fold->num_bytes);
    fold->has_result = true;
    fold_before(plan, fold->incoming, fold->side);
}

static int go_doubling(Request *request, const Plan *plan, Fold *fold) {
    const Comm *comm = plan->comm;
    if (fold->has_come) {
        fold_side(plan, fold);
        fold->has_come = false;
        fold->mask <<= 1;
    }
    for (; fold->mask < comm->size; fold->mask <<= 1) {
        int other = comm->rank ^ fold->mask;
        if (other >= comm->size) continue;
        fold->has_come = true;
        TRY(take(request, 0, comm->world[other], fold->incoming, fold->num_bytes));
        return give(request, 1, comm->world[other], fold->side, fold->num_bytes);
    }
    fold->stage = OVER;
    return MPI_SUCCESS;
}

/* ---- The request ---- */

static bool has_open_steps(const Request *request) {
    for (int i = 0; i < request->num_steps; i++)
        if (request->steps[i].operation.number) return true;
    return false;
}

static int error_of_steps(const Request *request) {
    for (int i = 0; i < request->num_steps; i++)
        if (request->steps[i].operation.ended.error) return request->steps[i].operation.ended.error;
    return MPI_SUCCESS;
}

/* Goes on until something is under way, or all is over. */
static int go_on(Request *request) {
    static int (*const stages[])(Request *, const Plan *, Fold *) = {
        [UP] = go_up, [TO_ROOT] = go_to_root, [ACROSS] = go_across, [DOWN] = go_down, [SHARES] = go_share,
        [DOUBLING] = go_doubling,
    };
    Running *running = request->state;
    Fold *fold = running->fold;
    while (fold->stage != OVER && !has_open_steps(request)) {
        TRY(error_of_steps(request));
        clear_steps(request);
        TRY(stages[fold->stage](request, &running->plan, fold));
    }
    return MPI_SUCCESS;
}

static int finish_fold(Request *request) {
    Running *running = request->state;
    const Plan *plan = &running->plan;
    Fold *fold = running->fold;
    if (!request->error && plan->receive.num && !plan->discards) {
        const Block into = block_at(&plan->receive, 0);
        int64_t num_bytes = data_bytes(into.type, own_count(plan));
        unpack_elements(fold->result, num_bytes, into.at, into.count, into.type);
    }
    drop_fold(fold);
    running->fold = NULL;
    return MPI_SUCCESS;
}

static Fold *make_fold(const Plan *plan) {
    Fold *fold = NEW(Fold);
    bool is_scan = plan->kind == KIND_SCAN || plan->kind == KIND_EXSCAN;
    fold->tag = next_tag(plan->comm);
    fold->mask = 1;
    fold->num_bytes = data_bytes(plan->send.type, plan->send.count);
    fold->result = NEW_ARRAY(char, fold->num_bytes);
    fold->incoming = NEW_ARRAY(char, fold->num_bytes);
    fold->has_result = plan->kind == KIND_SCAN;
    bool gives = !plan->comm->remote || plan->kind != KIND_REDUCE || plan->root >= 0;
    if (gives) pack_elements(plan->send.buffer, plan->send.count, plan->send.type, fold->result);
    if (is_scan) {
        fold->side = NEW_ARRAY(char, fold->num_bytes);
        memcpy(fold->side, fold->result, (size_t)fold->num_bytes);
    }
    fold->stage = is_scan ? DOUBLING : UP;
    if (!gives) fold->stage = plan->root == MPI_ROOT ? TO_ROOT : OVER;
    return fold;
}

int start_fold(Request *request) {
    Running *running = request->state;
    running->fold = make_fold(&running->plan);
    request->more = go_on;
    request->finish = finish_fold;
    return go_on(request);
}
