/* Collectives that are a message for each block: between two groups, and between neighbours.
 *
 * Each rank starts a receive for every block that it gets and a send for every block that it gives, on the hidden
 * number. Source: MPI 4.1, sections 6.2.2 and 8.6.
 */
#include "collective.h"
#include "topology.h"

/* The peers that a rank gives to or takes from: ranks `first` to `last` of the peers, or neighbours. */
typedef struct {
    int first, last;
    const Neighbours *neighbours;
} Partners;

static Partners partners_of(const Plan *plan, const Blocks *blocks, const Neighbours *neighbours) {
    if (!blocks->num) return (Partners){0, 0, NULL};
    if (neighbours) return (Partners){0, neighbours->count, neighbours};
    int kind = plan->kind;
    bool is_rooted = kind == KIND_BCAST || kind == KIND_GATHER || kind == KIND_GATHERV || kind == KIND_SCATTER ||
                     kind == KIND_SCATTERV;
    if (is_rooted && plan->root >= 0) return (Partners){plan->root, plan->root + 1, NULL};
    return (Partners){0, num_peers(plan->comm), NULL};
}

static Partners senders(const Plan *plan) {
    bool is_near = plan->kind == KIND_NEIGHBOURS;
    return partners_of(plan, &plan->receive, is_near ? &plan->comm->topology->sources : NULL);
}

static Partners takers(const Plan *plan) {
    bool is_near = plan->kind == KIND_NEIGHBOURS;
    return partners_of(plan, &plan->send, is_near ? &plan->comm->topology->destinations : NULL);
}

/* World rank of the i-th; ANY if there is nobody. */
static int world_of(const Plan *plan, const Partners *partners, int i) {
    int rank = partners->neighbours ? partners->neighbours->ranks[i] : i;
    return rank == MPI_PROC_NULL ? ANY : peer_of(plan->comm, rank);
}

static Block block_for(const Blocks *blocks, int i) {
    return block_at(blocks, blocks->num == 1 ? 0 : i);
}

int num_pairwise_steps(const Plan *plan) {
    Partners from = senders(plan), to = takers(plan);
    return from.last - from.first + to.last - to.first;
}

int start_pairwise(Request *request) {
    const Running *running = request->state;
    const Plan *plan = &running->plan;
    Partners from = senders(plan), to = takers(plan);
    uint64_t number = hidden_number(plan->comm);
    int step = 0, tag = next_tag(plan->comm);
    /* In a grid what is sent downwards arrives from above: a bit tells both apart when they are one rank. */
    int bit = plan->kind == KIND_NEIGHBOURS && plan->comm->topology->kind == MPI_CART;
    for (int i = from.first; i < from.last; i++) {
        int world = world_of(plan, &from, i);
        Block block = block_for(&plan->receive, i);
        int mark = tag | (i & bit);
        if (world != ANY) TRY(step_receive(request, step++, number, world, mark, block.at, block.count, block.type));
    }
    for (int i = to.first; i < to.last; i++) {
        int world = world_of(plan, &to, i);
        Block block = block_for(&plan->send, i);
        int mark = tag | (~i & bit);
        if (world != ANY) TRY(step_send(request, step++, 0, number, world, mark, block.at, block.count, block.type));
    }
    return MPI_SUCCESS;
}
