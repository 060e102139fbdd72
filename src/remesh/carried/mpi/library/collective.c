/* How is a plan carried out, in each of its three forms: waiting, started, or kept for many starts?
 *
 * On a communicator of one group a collective is one call of the lower half, which is all that a blocking one of dense
 * data costs. Between groups and between neighbours it is a message for each block (pairwise.c); reductions that the
 * real MPI cannot do are folded by messages of ours (fold.c).
 */
#include "collective.h"

/* ---- One call of the lower half ---- */

/* Bytes for each rank and from each, or elements, as the kind asks for; NULL if it asks for none. */
static int64_t *make_counts(const Plan *plan, uint32_t *num_counts) {
    bool gives = plan->kind == KIND_SCATTERV || plan->kind == KIND_ALLTOALLV;
    bool takes = plan->kind == KIND_GATHERV || plan->kind == KIND_ALLGATHERV || plan->kind == KIND_ALLTOALLV;
    int num_given = gives && plan->send.num > 0 ? plan->send.num : 0;
    int num_taken = takes && plan->receive.num > 0 ? plan->receive.num : 0;
    int num_shares = plan->kind == KIND_REDUCE_SCATTER ? plan->comm->size : 0;
    *num_counts = (uint32_t)(num_given + num_taken + num_shares);
    if (!*num_counts) return NULL;
    int64_t *counts = NEW_ARRAY(int64_t, *num_counts);
    for (int i = 0; i < num_given; i++) counts[i] = bytes_of_block(&plan->send, i);
    for (int i = 0; i < num_taken; i++) counts[num_given + i] = bytes_of_block(&plan->receive, i);
    for (int i = 0; i < num_shares; i++) counts[i] = share_of(plan, i);
    return counts;
}

static Payload payload_of_blocks(const Blocks *blocks) {
    Block whole;
    if (!blocks->num) return (Payload){0};
    if (is_one_block(blocks, &whole)) return payload_of(whole.at, whole.count, whole.type);
    int64_t num_bytes = bytes_of_blocks(blocks);
    void *packed = must_have(malloc(num_bytes ? (size_t)num_bytes : 1));
    pack_blocks(blocks, packed);
    return (Payload){packed, num_bytes, packed};
}

/* Where what comes lands: in `step`, or `packed` if it has to be unpacked once it is there. */
static void prepare_landing(const Plan *plan, Step *step, void **packed) {
    Block whole;
    *packed = NULL;
    if (!plan->receive.num) return;
    if (!plan->discards && is_one_block(&plan->receive, &whole)) {
        step->landing = landing_for(whole.at, whole.count, whole.type);
        step->operation.at = step->landing.at;
        step->operation.room = step->landing.room;
        return;
    }
    step->operation.room = bytes_of_blocks(&plan->receive);
    step->operation.at = *packed = must_have(malloc(step->operation.room ? (size_t)step->operation.room : 1));
}

static void finish_packed(const Plan *plan, const Operation *operation, void **packed) {
    if (*packed && !plan->discards && !operation->ended.error) unpack_blocks(&plan->receive, *packed);
    free(*packed);
    *packed = NULL;
}

/* Starts it, or waits for it too; `step` has its operation, and owns what was packed. */
static int call_lower(int flags, const Plan *plan, Step *step, void **packed) {
    Payload payload = payload_of_blocks(&plan->send);
    prepare_landing(plan, step, packed);
    step->owned = payload.owned;
    uint32_t num_counts;
    int64_t *counts = make_counts(plan, &num_counts);
    Collective collective = {.kind = plan->kind, .root = plan->root, .counts = counts, .num_counts = num_counts};
    collective.send = payload.at;
    collective.send_bytes = payload.num_bytes;
    if (plan->op) {
        collective.op = plan->op->number;
        collective.type = real_type(plan->send.type);
    }
    int error = lower_collective(flags, plan->comm->number, &collective, &step->operation);
    free(counts);
    return error;
}

static int call_and_wait(const Plan *plan) {
    Step step = {0};
    void *packed;
    bool others = must_carry_on();
    int error = call_lower(others ? 0 : FLAG_BLOCKING, plan, &step, &packed);
    if (!error && step.operation.number) error = wait_for_operation(&step.operation);
    if (!error) error = step.operation.ended.error;
    if (step.landing.type && error) drop_landing(&step.landing);
    else if (step.landing.type) land(&step.landing, step.landing.room);
    if (error) step.operation.ended.error = error;
    finish_packed(plan, &step.operation, &packed);
    free(step.owned);
    return error;
}

/* ---- Requests ---- */

static void drop_running(void *state) {
    Running *running = state;
    Plan *plan = &running->plan;
    drop_counts(&plan->shares);
    drop_own_counts(&plan->send);
    drop_own_counts(&plan->receive);
    drop_fold(running->fold);
    free(running->packed);
    drop_types(&plan->send);
    drop_types(&plan->receive);
    let_go(plan->send.type);
    let_go(plan->receive.type);
    let_go(plan->op);
    let_go(running->own);
    free(running);
}

static int start_call(Request *request) {
    Running *running = request->state;
    free(running->packed);
    return call_lower(0, &running->plan, &request->steps[0], &running->packed);
}

static int finish_call(Request *request) {
    Running *running = request->state;
    finish_packed(&running->plan, &request->steps[0].operation, &running->packed);
    return MPI_SUCCESS;
}

/* A request that has not begun. What the plan speaks of stays until the request goes. */
static Request *make_running(Plan *plan) {
    Running *running = NEW(Running);
    running->plan = *plan;
    /* Programs, mpi4py's wheels among them, let their arrays go when they have the request. */
    own_counts(&running->plan.shares, plan->comm->size);
    own_arrays(&running->plan.send);
    own_arrays(&running->plan.receive);
    keep(plan->send.type);
    keep(plan->receive.type);
    keep(plan->op);
    bool calls = is_one_call(plan);
    int num_steps = calls ? 1 : plan->op ? num_fold_steps(plan) : num_pairwise_steps(plan);
    Request *request = make_request(plan->comm, num_steps);
    request->state = running;
    request->drop_state = drop_running;
    request->start = calls ? start_call : plan->op ? start_fold : start_pairwise;
    if (calls) request->finish = finish_call;
    return request;
}

int run_plan(Plan *plan) {
    if (is_one_call(plan)) {
        int error = call_and_wait(plan);
        drop_types(&plan->send);
        drop_types(&plan->receive);
        return error;
    }
    Request *request;
    TRY(start_plan(plan, &request));
    return finish_now(request);
}

int start_plan(Plan *plan, Request **made) {
    Request *request = make_running(plan);
    int error = request->start(request);
    if (error) {
        let_go(request);
        return error;
    }
    if (request->more) carry_on(request);
    *made = request;
    return MPI_SUCCESS;
}

int keep_plan(Plan *plan, Request **made) {
    /* Members make such requests in one order, and may start them in any. So each has a communicator to itself. */
    Comm *own;
    int error = duplicate_for_library(plan->comm, &own);
    if (error) {
        drop_types(&plan->send);
        drop_types(&plan->receive);
        return error;
    }
    *made = make_running(plan);
    Running *running = (*made)->state;
    running->plan.comm = running->own = own;
    (*made)->is_persistent = true;
    return MPI_SUCCESS;
}
