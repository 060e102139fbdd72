/* How does a request come to its end?
 *
 * A request is steps, each an operation of the lower half, and what is to be done in this process once all are over. It
 * goes on when a thread asks for it, or when any thread waits for anything and the request is one that is carried on.
 * The thread that serves a request has claimed it, so no step lands twice; a second thread that wants it waits.
 */
#include "request.h"
#include "polling.h"

#include <sched.h>
#include <time.h>

/* Requests that are carried on: singly linked, under process.guard; each has a reference of the list's. */
static Request *carried;
static atomic_int num_carried;

static void drop_step(Step *step) {
    if (step->landing.type) drop_landing(&step->landing);
    free(step->owned);
    *step = (Step){0};
}

static void destroy_request(void *object) {
    Request *request = object;
    for (int i = 0; i < request->num_steps; i++) drop_step(&request->steps[i]);
    if (request->steps != &request->one) free(request->steps);
    if (request->drop_state) request->drop_state(request->state);
    else free(request->state);
    free(request->generalized);
    free(request->partitioned);
    let_go(request->comm);
}


Request *make_request(Comm *comm, int num_steps) {
    Request *request = make_object(KIND_REQUEST, sizeof *request);
    request->comm = comm;
    keep(comm);
    request->num_steps = num_steps;
    request->steps = num_steps <= 1 ? &request->one : NEW_ARRAY(Step, num_steps);
    set_empty_status(&request->status);
    return request;
}

Request *sent_request;

void make_predefined_requests(void) {
    set_destructor(KIND_REQUEST, destroy_request);
    set_destructor(KIND_MESSAGE, destroy_message);
    sent_request = make_request(NULL, 0);
    sent_request->is_shared = true;
    atomic_store(&sent_request->is_finished, true);
}

void rewind_request(Request *request) {
    for (int i = 0; i < request->num_steps; i++) drop_step(&request->steps[i]);
    request->error = MPI_SUCCESS;
    request->is_unwanted = false;
    set_empty_status(&request->status);
    atomic_store(&request->is_finished, false);
}

int step_send(Request *request, int i, int flags, uint64_t number, int peer, int tag, const void *buffer,
              MPI_Count count, Datatype *type) {
    Step *step = &request->steps[i];
    Payload payload = payload_of(buffer, count, type);
    *step = (Step){.owned = payload.owned};
    return lower_send(flags, number, peer, tag, payload.at, payload.num_bytes, &step->operation);
}

int step_receive(Request *request, int i, uint64_t number, int peer, int tag, void *buffer, MPI_Count count,
                 Datatype *type) {
    Step *step = &request->steps[i];
    *step = (Step){.landing = landing_for(buffer, count, type)};
    step->operation.at = step->landing.at;
    step->operation.room = step->landing.room;
    return lower_receive(0, number, peer, tag, &step->operation);
}

/* ---- One request ---- */

static bool claim(Request *request) {
    int nobody = 0;
    return atomic_compare_exchange_strong_explicit(&request->claim, &nobody, 1, memory_order_acquire,
                                                   memory_order_relaxed);
}

static void give_back(Request *request) { atomic_store_explicit(&request->claim, 0, memory_order_release); }

static bool has_open_steps(const Request *request) {
    for (int i = 0; i < request->num_steps; i++)
        if (request->steps[i].operation.number) return true;
    return false;
}

/* Puts in place what has come; notes the first error. */
static void settle_step(Request *request, Step *step) {
    const Ended *ended = &step->operation.ended;
    if (ended->error && !request->error) request->error = ended->error;
    if (step->landing.type) {
        int64_t room = step->landing.room;
        if (ended->is_cancelled) drop_landing(&step->landing);
        else land(&step->landing, ended->num_bytes < room ? ended->num_bytes : room);
        step->landing.type = NULL;
    }
    free(step->owned);
    step->owned = NULL;
}

static void note_status(Request *request) {
    const Ended *ended = &request->steps[0].operation.ended;
    if (ended->is_cancelled) set_status(&request->status, MPI_ANY_SOURCE, MPI_ANY_TAG, 0, true);
    else if (request->is_receive) set_receive_status(ended, request->comm, &request->status);
}

void set_receive_status(const Ended *ended, const Comm *comm, MPI_Status *status) {
    int source = ended->source == ANY ? MPI_ANY_SOURCE : rank_of_peer(comm, ended->source);
    set_status(status, source, ended->tag == ANY ? MPI_ANY_TAG : ended->tag, ended->num_bytes, ended->is_cancelled);
}

/* Goes on with a claimed request as far as that needs no other rank. */
static void advance(Request *request) {
    do {
        /* Before the steps are looked at: until then another thread may be starting one. */
        if (request->is_over_elsewhere && !request->is_over_elsewhere(request)) return;
        if (has_open_steps(request)) return;
        for (int i = 0; i < request->num_steps; i++) settle_step(request, &request->steps[i]);
        if (request->more && !request->error) request->error = request->more(request);
    } while (has_open_steps(request));
    if (request->num_steps) note_status(request);
    if (request->finish) {
        int error = request->finish(request);
        if (!request->error) request->error = error;
    }
    atomic_store_explicit(&request->is_finished, true, memory_order_release);
}

static bool is_done(const Request *request) {
    return is_idle(request) || atomic_load_explicit(&request->is_finished, memory_order_acquire);
}

/* ---- Those that are carried on ---- */

void carry_on(Request *request) {
    LOCKED if (!request->is_carried_on) {
        keep(request);
        request->is_carried_on = true;
        request->next = carried;
        carried = request;
        atomic_fetch_add(&num_carried, 1);
    }
}

bool must_carry_on(void) { return atomic_load_explicit(&num_carried, memory_order_relaxed) > 0; }

/* Takes those that are finished out of the list; a new array of the others, each kept, for who asked. */
static Request **those_carried(int *count) {
    Request **found = NULL, *gone = NULL;
    *count = 0;
    LOCKED {
        found = NEW_ARRAY(Request *, atomic_load(&num_carried));
        for (Request **at = &carried; *at;) {
            Request *one = *at;
            if (is_done(one)) {
                *at = one->next;
                one->is_carried_on = false;
                one->next = gone;
                gone = one;
                atomic_fetch_sub(&num_carried, 1);
            } else {
                keep(one);
                found[(*count)++] = one;
                at = &one->next;
            }
        }
    }
    while (gone) {
        Request *one = gone;
        gone = one->next;
        one->next = NULL;
        let_go(one);
    }
    return found;
}

/* ---- Many requests ---- */

/* What one round asks the lower half for. Most rounds need no memory but this. */
enum { FEW = 32 };
typedef struct {
    Operation **operations, *few[FEW];
    int64_t count, room;
    Request **claimed, *few_claimed[FEW];
    int64_t num_claimed, room_claimed;
    bool asks_elsewhere; /* something that is waited for is no operation, or another thread's */
} Round;

static void round_begin(Round *round) {
    round->operations = round->few;
    round->claimed = round->few_claimed;
    round->room = round->room_claimed = FEW;
    round->count = round->num_claimed = 0;
    round->asks_elsewhere = false;
}

/* Room for one more in an array that begins as a part of its owner. */
static void *grown(void *array, const void *own, int64_t count, int64_t *room) {
    if (count < *room) return array;
    void **more = must_have(malloc((size_t)*room * 2 * sizeof *more));
    memcpy(more, array, (size_t)count * sizeof *more);
    if (array != own) free(array);
    *room *= 2;
    return more;
}

static void round_add_operation(Round *round, Operation *operation) {
    round->operations = grown(round->operations, round->few, round->count, &round->room);
    round->operations[round->count++] = operation;
}

/* Takes a request into the round if it is nobody else's; whether it is finished. */
static bool round_take(Round *round, Request *request) {
    if (is_done(request)) return true;
    if (!claim(request)) return round->asks_elsewhere = true, false;
    if (!is_done(request)) advance(request);
    if (is_done(request)) return give_back(request), true;
    round->claimed = grown(round->claimed, round->few_claimed, round->num_claimed, &round->room_claimed);
    round->claimed[round->num_claimed++] = request;
    int64_t before = round->count;
    for (int i = 0; i < request->num_steps; i++)
        if (request->steps[i].operation.number) round_add_operation(round, &request->steps[i].operation);
    if (round->count == before) round->asks_elsewhere = true;
    return false;
}

static void round_end(Round *round) {
    for (int64_t i = 0; i < round->num_claimed; i++) {
        advance(round->claimed[i]);
        give_back(round->claimed[i]);
    }
    if (round->claimed != round->few_claimed) free(round->claimed);
    if (round->operations != round->few) free(round->operations);
}

static void pause_for(int turn) {
    if (turn < 16) {
        sched_yield();
        return;
    }
    nanosleep(&(struct timespec){0, turn < 64 ? 50000 : 1000000}, NULL);
}

/* What is waited for: requests, one operation that is no request's, or neither. */
typedef struct {
    Request *const *requests;
    int64_t count;
    Operation *operation;
    bool every;
} Wanted;

/* Adds what is wanted to the round; whether enough of it is finished. */
static bool round_want(Round *round, const Wanted *wanted) {
    int64_t num_finished = 0;
    if (wanted->operation) {
        if (!wanted->operation->number) return true;
        round_add_operation(round, wanted->operation);
    }
    for (int64_t i = 0; i < wanted->count; i++) num_finished += round_take(round, wanted->requests[i]);
    if (wanted->every) return !wanted->operation && num_finished == wanted->count;
    return num_finished > 0 || (!wanted->operation && !wanted->count);
}

/* Asks for those of the round, if they are not known to be under way. */
static int poll(const Round *round) {
    int64_t asked_ns = begin_poll();
    if (are_known_open(round->operations, round->count, asked_ns)) return MPI_SUCCESS;
    TRY(lower_wait(0, MODE_SOME, round->operations, round->count));
    note_open(round->operations, round->count, asked_ns);
    return MPI_SUCCESS;
}

/* One round of asking. `turn` counts the rounds of who waits; -1: he only looks. Whether it is enough. */
static int go_round(const Wanted *wanted, int turn, bool *is_enough) {
    Round round;
    int error = MPI_SUCCESS;
    round_begin(&round);
    *is_enough = round_want(&round, wanted);
    if (!*is_enough || turn < 0) {
        int num_others = 0;
        Request **others = must_carry_on() ? those_carried(&num_others) : NULL;
        bool elsewhere = round.asks_elsewhere;
        for (int i = 0; i < num_others; i++) round_take(&round, others[i]);
        /* What another thread or the program itself completes wakes nobody in the lower half; what is only carried on
         * may wait for its own.
         */
        bool sleeps = turn >= 0 && !elsewhere && !(num_others && round.asks_elsewhere);
        int mode = sleeps && wanted->every && !num_others ? MODE_ALL : MODE_SOME;
        if (turn < 0 && wanted->count) error = poll(&round);
        else if (round.count) error = lower_wait(sleeps ? FLAG_BLOCKING : 0, mode, round.operations, round.count);
        round_end(&round);
        if (turn > 0 && !sleeps) pause_for(turn);
        for (int i = 0; i < num_others; i++) let_go(others[i]);
        free(others);
    } else {
        round_end(&round);
    }
    return error;
}

int progress(Request *const *requests, int64_t count, bool blocking, bool every) {
    Wanted wanted = {requests, count, NULL, every};
    bool is_enough = false;
    if (!blocking) return go_round(&wanted, -1, &is_enough);
    for (int turn = 0; !is_enough; turn += turn < INT_MAX) TRY(go_round(&wanted, turn, &is_enough));
    return MPI_SUCCESS;
}

int wait_for_operation(Operation *operation) {
    Wanted wanted = {NULL, 0, operation, false};
    bool is_enough = false;
    for (int turn = 0; !is_enough; turn += turn < INT_MAX) TRY(go_round(&wanted, turn, &is_enough));
    return MPI_SUCCESS;
}

int look_and_pause(int turn) {
    Wanted nothing = {NULL, 0, NULL, true};
    bool is_enough;
    if (must_carry_on()) TRY(go_round(&nothing, -1, &is_enough));
    pause_for(turn);
    return MPI_SUCCESS;
}

int finish_now(Request *request) {
    int error = progress(&request, 1, true, true);
    if (!error) error = request->error;
    let_go(request);
    return error;
}
