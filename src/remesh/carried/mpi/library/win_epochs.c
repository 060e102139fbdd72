/* When may a window be accessed, and when are accesses over? Fences, groups of partners, locks, flushes.
 *
 * All of it is made of ordinary traffic: a fence waits for this rank's accesses and enters a barrier; post, start,
 * complete and wait are empty messages on the window's own communicator; a lock is asked for at its target's lower
 * half, which keeps the queue. Source: MPI 4.1, section 12.5.
 */
#include "channel.h"
#include "exchange.h"
#include "group.h"
#include "request.h"
#include "win.h"

/* Tags on the window's own communicator. */
enum { HAS_POSTED = 1, HAS_COMPLETED = 2 };

/* ---- Pending accesses ---- */

/* So many are waited for before there are more: a program may access for hours without a flush. */
enum { MOST_PENDING = 4096 };

static void append(Win *win, Pending pending) {
    if (win->num_pending == win->room_pending) {
        win->room_pending = win->room_pending ? 2 * win->room_pending : 16;
        win->pending = must_have(realloc(win->pending, (size_t)win->room_pending * sizeof *win->pending));
    }
    win->pending[win->num_pending++] = pending;
}

int note_access(Win *win, int rank, Request *request, bool is_own) {
    bool is_full = false;
    if (is_own) keep(request);
    LOCKED {
        append(win, (Pending){rank, is_own, request});
        is_full = win->num_pending >= MOST_PENDING;
    }
    return is_full ? flush_accesses(win, MPI_ANY_SOURCE) : MPI_SUCCESS;
}

/* Takes those to this rank out of the window; how many. */
static int64_t take_pending(Win *win, int rank, Pending **taken) {
    int64_t count = 0, num_left = 0;
    LOCKED {
        *taken = NEW_ARRAY(Pending, win->num_pending);
        for (int64_t i = 0; i < win->num_pending; i++) {
            Pending one = win->pending[i];
            if (rank == MPI_ANY_SOURCE || one.rank == rank) (*taken)[count++] = one;
            else win->pending[num_left++] = one;
        }
        win->num_pending = num_left;
    }
    return count;
}

int flush_accesses(Win *win, int rank) {
    if (win->num_pending == 0) return MPI_SUCCESS;
    Pending *taken;
    int64_t count = take_pending(win, rank, &taken);
    Request **requests = NEW_ARRAY(Request *, count);
    for (int64_t i = 0; i < count; i++) requests[i] = taken[i].request;
    int error = progress(requests, count, true, true);
    for (int64_t i = 0; i < count; i++) {
        if (!taken[i].is_own && !error) error = requests[i]->error;
        let_go(requests[i]);
    }
    free(requests);
    free(taken);
    return error;
}

/* ---- What may be accessed ---- */

int check_window_rank(const Win *win, int rank) {
    if (rank >= 0 && rank < win->comm->size) return MPI_SUCCESS;
    return fail(MPI_ERR_RANK, "rank %d of a window of %d", rank, win->comm->size);
}

int check_epoch(Win *win, int rank) {
    if (win->is_partner[rank]) {
        Request *word = win->words[rank];
        if (!word) return MPI_SUCCESS;
        win->words[rank] = NULL;
        return finish_now(word);
    }
    if (win->is_locked_all || win->locked[rank]) return MPI_SUCCESS;
    if (win->fence != NOT_FENCED) return win->fence = FENCED_AND_ACCESSED, MPI_SUCCESS;
    return fail(MPI_ERR_RMA_SYNC, "rank %d is accessed outside any epoch: call MPI_Win_fence, MPI_Win_start or "
                "MPI_Win_lock before", rank);
}

static int expect_none_locked(const Win *win, const char *what) {
    if (!win->num_locked) return MPI_SUCCESS;
    return fail(MPI_ERR_RMA_SYNC, "%s while this rank has %d locks; call MPI_Win_unlock first", what, win->num_locked);
}

int expect_no_epoch(const Win *win, const char *what) {
    TRY(expect_none_locked(win, what));
    if (win->num_started >= 0)
        return fail(MPI_ERR_RMA_SYNC, "%s in an access epoch; call MPI_Win_complete first", what);
    return win->exposed ? fail(MPI_ERR_RMA_SYNC, "%s while the window is exposed; call MPI_Win_wait first", what)
                        : MPI_SUCCESS;
}

/* Of accesses to partners or under locks. The epoch of a fence in which nothing was accessed was none. */
static int leave_fence(Win *win, const char *what) {
    if (win->fence == FENCED_AND_ACCESSED)
        return fail(MPI_ERR_RMA_SYNC, "%s in the epoch of a fence; call MPI_Win_fence first", what);
    win->fence = NOT_FENCED;
    return MPI_SUCCESS;
}

/* ---- All together ---- */

int do_Win_fence(int assert, Win *win) {
    TRY(expect_no_epoch(win, "a fence"));
    int error = flush_accesses(win, MPI_ANY_SOURCE);
    TRY(barrier(win->comm));
    win->fence = assert & MPI_MODE_NOSUCCEED ? NOT_FENCED : FENCED;
    return error;
}

/* ---- Partners ---- */

/* Ranks in the window of a group's members. */
static int find_partners(const Win *win, const Group *group, int **ranks) {
    *ranks = NEW_ARRAY(int, group->size);
    for (int i = 0; i < group->size; i++) {
        (*ranks)[i] = rank_of_peer(win->comm, group->world[i]);
        if ((*ranks)[i] >= 0) continue;
        free(*ranks);
        return fail(MPI_ERR_GROUP, "rank %d of the group is not in the window's", i);
    }
    return MPI_SUCCESS;
}

static int send_word(const Win *win, int rank, int tag) {
    Operation operation = {0};
    int flags = must_carry_on() ? 0 : FLAG_BLOCKING;
    TRY(lower_send(flags, win->comm->number, win->comm->world[rank], tag, NULL, 0, &operation));
    TRY(wait_for_operation(&operation));
    return operation.ended.error;
}

static int await_word(const Win *win, Request *request, int i, int rank, int tag) {
    Step *step = &request->steps[i];
    *step = (Step){0};
    return lower_receive(0, win->comm->number, win->comm->world[rank], tag, &step->operation);
}

int do_Win_post(Group *group, int assert, Win *win) {
    if (win->exposed) return fail(MPI_ERR_RMA_SYNC, "the window is exposed already; call MPI_Win_wait first");
    int *ranks;
    TRY(find_partners(win, group, &ranks));
    Request *words = make_request(win->comm, group->size);
    int error = MPI_SUCCESS;
    for (int i = 0; i < group->size && !error; i++) error = await_word(win, words, i, ranks[i], HAS_COMPLETED);
    for (int i = 0; i < group->size && !error && !(assert & MPI_MODE_NOCHECK); i++)
        error = send_word(win, ranks[i], HAS_POSTED);
    free(ranks);
    win->exposed = words;
    return error;
}

int do_Win_start(Group *group, int assert, Win *win) {
    if (win->num_started >= 0)
        return fail(MPI_ERR_RMA_SYNC, "an access epoch is open already; call MPI_Win_complete first");
    TRY(expect_none_locked(win, "an access epoch"));
    TRY(leave_fence(win, "an access epoch"));
    int *ranks, error = MPI_SUCCESS;
    TRY(find_partners(win, group, &ranks));
    free(win->started);
    win->started = ranks;
    win->num_started = group->size;
    for (int i = 0; i < group->size && !error; i++) {
        win->is_partner[ranks[i]] = true;
        if (assert & MPI_MODE_NOCHECK) continue;
        win->words[ranks[i]] = make_request(win->comm, 1);
        error = await_word(win, win->words[ranks[i]], 0, ranks[i], HAS_POSTED);
    }
    return error;
}

int do_Win_complete(Win *win) {
    if (win->num_started < 0) return fail(MPI_ERR_RMA_SYNC, "no access epoch is open; call MPI_Win_start first");
    int error = MPI_SUCCESS;
    for (int i = 0; i < win->num_started; i++) {
        int rank = win->started[i], failed = check_epoch(win, rank);
        if (!failed) failed = flush_accesses(win, rank);
        if (!error) error = failed;
    }
    for (int i = 0; i < win->num_started; i++) {
        int failed = send_word(win, win->started[i], HAS_COMPLETED);
        if (!error) error = failed;
        win->is_partner[win->started[i]] = false;
    }
    win->num_started = -1;
    return error;
}

static int check_exposed(const Win *win) {
    return win->exposed ? MPI_SUCCESS : fail(MPI_ERR_RMA_SYNC, "the window is not exposed; call MPI_Win_post first");
}

int do_Win_wait(Win *win) {
    TRY(check_exposed(win));
    Request *words = win->exposed;
    win->exposed = NULL;
    return finish_now(words);
}

int do_Win_test(Win *win, int *flag) {
    TRY(check_exposed(win));
    TRY(progress(&win->exposed, 1, false, true));
    *flag = atomic_load(&win->exposed->is_finished);
    return *flag ? do_Win_wait(win) : MPI_SUCCESS;
}

/* ---- Locks ---- */

static int ask_for_lock(Win *win, int rank, bool is_exclusive) {
    Operation operation = {0};
    int flags = must_carry_on() ? 0 : FLAG_BLOCKING;
    TRY(lower_lock(flags, win->comm->number, win->comm->world[rank], is_exclusive, &operation));
    TRY(wait_for_operation(&operation));
    return operation.ended.error;
}

static int give_lock_back(Win *win, int rank) {
    bool is_known = win->locked[rank] == LOCK_HELD;
    win->num_locked -= win->locked[rank] != NOT_LOCKED;
    win->locked[rank] = NOT_LOCKED;
    return is_known ? lower_unlock(win->comm->number, win->comm->world[rank]) : MPI_SUCCESS;
}

static int expect_not_started(const Win *win) {
    if (win->num_started < 0) return MPI_SUCCESS;
    return fail(MPI_ERR_RMA_SYNC, "a lock in an access epoch; call MPI_Win_complete first");
}

int do_Win_lock(int lock_type, int rank, int assert, Win *win) {
    if (rank == MPI_PROC_NULL) return MPI_SUCCESS;
    if (lock_type != MPI_LOCK_EXCLUSIVE && lock_type != MPI_LOCK_SHARED)
        return fail(MPI_ERR_LOCKTYPE, "lock_type is %d, expected MPI_LOCK_EXCLUSIVE or MPI_LOCK_SHARED", lock_type);
    TRY(check_window_rank(win, rank));
    if (win->locked[rank] || win->is_locked_all)
        return fail(MPI_ERR_RMA_SYNC, "this rank has a lock on rank %d already; call MPI_Win_unlock first", rank);
    TRY(expect_not_started(win));
    TRY(leave_fence(win, "a lock"));
    bool asks = !(assert & MPI_MODE_NOCHECK);
    if (asks) TRY(ask_for_lock(win, rank, lock_type == MPI_LOCK_EXCLUSIVE));
    win->locked[rank] = asks ? LOCK_HELD : LOCK_UNASKED;
    win->num_locked++;
    return MPI_SUCCESS;
}

int do_Win_unlock(int rank, Win *win) {
    if (rank == MPI_PROC_NULL) return MPI_SUCCESS;
    TRY(check_window_rank(win, rank));
    if (!win->locked[rank] || win->is_locked_all)
        return fail(MPI_ERR_RMA_SYNC, "this rank has no lock on rank %d; call MPI_Win_lock first", rank);
    int error = flush_accesses(win, rank);
    TRY(give_lock_back(win, rank));
    return error;
}

/* Those for whom all locks are asked at once, and waited for together. */
static int ask_for_all(Win *win) {
    Request *locks = make_request(win->comm, win->comm->size);
    int error = MPI_SUCCESS;
    for (int rank = 0; rank < win->comm->size && !error; rank++) {
        Operation *operation = &locks->steps[rank].operation;
        error = lower_lock(0, win->comm->number, win->comm->world[rank], false, operation);
    }
    int waited = finish_now(locks);
    return error ? error : waited;
}

int do_Win_lock_all(int assert, Win *win) {
    if (win->num_locked || win->is_locked_all)
        return fail(MPI_ERR_RMA_SYNC, "this rank has %d locks already; call MPI_Win_unlock first", win->num_locked);
    TRY(expect_not_started(win));
    TRY(leave_fence(win, "a lock"));
    bool asks = !(assert & MPI_MODE_NOCHECK);
    if (asks) TRY(ask_for_all(win));
    memset(win->locked, asks ? LOCK_HELD : LOCK_UNASKED, (size_t)win->comm->size);
    win->num_locked = win->comm->size;
    win->is_locked_all = true;
    return MPI_SUCCESS;
}

int do_Win_unlock_all(Win *win) {
    if (!win->is_locked_all) return fail(MPI_ERR_RMA_SYNC, "the ranks are not locked; call MPI_Win_lock_all first");
    int error = flush_accesses(win, MPI_ANY_SOURCE);
    win->is_locked_all = false;
    for (int rank = 0; rank < win->comm->size; rank++) {
        int failed = give_lock_back(win, rank);
        if (!error) error = failed;
    }
    return error;
}

/* ---- Accesses that are over before their epoch is ---- */

int do_Win_flush(int rank, Win *win) {
    if (rank == MPI_PROC_NULL) return MPI_SUCCESS;
    TRY(check_window_rank(win, rank));
    if (!win->locked[rank])
        return fail(MPI_ERR_RMA_SYNC, "this rank has no lock on rank %d; call MPI_Win_lock first", rank);
    return flush_accesses(win, rank);
}

int do_Win_flush_all(Win *win) {
    if (!win->num_locked)
        return fail(MPI_ERR_RMA_SYNC, "this rank has no lock; call MPI_Win_lock_all first");
    return flush_accesses(win, MPI_ANY_SOURCE);
}

/* An access is over at its target before its origin hears of it. */
int do_Win_flush_local(int rank, Win *win) { return do_Win_flush(rank, win); }

int do_Win_flush_local_all(Win *win) { return do_Win_flush_all(win); }

/* Others write to this process's own memory, of which there is no second copy. */
int do_Win_sync(Win *win) {
    (void)win;
    atomic_thread_fence(memory_order_seq_cst);
    return MPI_SUCCESS;
}
