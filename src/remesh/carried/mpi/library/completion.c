/* Waiting for requests and testing them: MPI_Wait and its families, and what else a program does with a request.
 *
 * A call first lists the active ones among its requests, so that no two calls complete one request, then asks
 * progress(), then retires what is finished: tells its status, and makes its handle null or the request inactive.
 */
#include "request.h"

int tell_status(Request *request, MPI_Status *status) {
    if (request->generalized) return query_generalized(request, status);
    const MPI_Status *from = &request->status;
    set_status(status, from->MPI_SOURCE, from->MPI_TAG, status_bytes(from), status_cancelled(from));
    return MPI_SUCCESS;
}

static bool is_finished(const Request *request) {
    return atomic_load_explicit(&request->is_finished, memory_order_acquire);
}

/* The object behind a handle of the program's; NULL for MPI_REQUEST_NULL. */
static int find_request(MPI_Request handle, Request **request) {
    *request = request_of(handle);
    if (!*request && handle != MPI_REQUEST_NULL)
        return fail(MPI_ERR_REQUEST, "the handle is no request, or of one that is over");
    return MPI_SUCCESS;
}

/* An error of an operation that is now over: its communicator's handler gets it. */
static int blame_holder(const Request *request, int error) {
    if (!error || error == MPI_ERR_IN_STATUS) return error;
    void *holder = request->win ? (void *)request->win : (void *)request->comm;
    const char *words = "an operation has failed; it was started earlier, and this call has completed it";
    if (error == MPI_ERR_TRUNCATE)
        return fail_on(holder, error, "a message of %lld bytes is longer than the buffer of its receive",
                       (long long)status_bytes(&request->status));
    return fail_on(holder, error, "%s", words);
}

/* ---- Listing ---- */

static int list_one(Request *request) {
    if (request->is_shared || !atomic_exchange(&request->is_listed, true)) return MPI_SUCCESS;
    return fail(MPI_ERR_REQUEST, "the request stands twice in one list, or another thread is completing it");
}

static void unlist_one(Request *request) {
    if (!request->is_shared) atomic_store(&request->is_listed, false);
}

/* The active requests among those of a call, and where they stand. */
enum { FEW = 32 };
typedef struct {
    Request **requests, *few[FEW];
    int *places, few_places[FEW];
    int count;
    bool completes; /* the call may complete them */
} List;

static void list_end(List *list) {
    for (int i = 0; list->completes && i < list->count; i++)
        if (list->requests[i]) unlist_one(list->requests[i]);
    if (list->requests != list->few) free(list->requests);
    if (list->places != list->few_places) free(list->places);
}

static int list_begin(List *list, int count, const MPI_Request handles[], bool completes) {
    list->requests = count <= FEW ? list->few : NEW_ARRAY(Request *, count);
    list->places = count <= FEW ? list->few_places : NEW_ARRAY(int, count);
    list->count = 0;
    list->completes = completes;
    for (int i = 0; i < count; i++) {
        Request *request;
        int error = find_request(handles[i], &request);
        if (!error && is_idle(request)) continue;
        if (!error && completes) error = list_one(request);
        if (error) {
            list_end(list);
            return error;
        }
        list->requests[list->count] = request;
        list->places[list->count++] = i;
    }
    return MPI_SUCCESS;
}

static int list_progress(const List *list, bool blocking, bool every) {
    return progress(list->requests, list->count, blocking, every);
}

/* ---- Retiring ---- */

/* It is finished: tells the status; the handle becomes null, or the request inactive. Its error. */
static int retire(Request *request, MPI_Request *handle, MPI_Status *status) {
    int error = tell_status(request, status);
    if (!error) error = blame_holder(request, request->error);
    if (request->generalized) {
        int freed = free_generalized(request);
        if (!error) error = freed;
    }
    if (request->is_persistent) {
        atomic_store(&request->is_active, false);
        unlist_one(request);
        return error;
    }
    *handle = MPI_REQUEST_NULL;
    if (!request->is_shared) free_handle(request);
    return error;
}

/* The same for the i-th of a list. */
static int retire_listed(List *list, int i, MPI_Request handles[], MPI_Status *status) {
    Request *request = list->requests[i];
    list->requests[i] = NULL;
    return retire(request, &handles[list->places[i]], status);
}

/* ---- One request ---- */

/* MPI_Wait and MPI_Test. */
static int end_one(MPI_Request *handle, bool blocking, int *flag, MPI_Status *status) {
    Request *request;
    TRY(find_request(*handle, &request));
    *flag = 1;
    if (is_idle(request)) {
        set_empty_status(status);
        return MPI_SUCCESS;
    }
    TRY(list_one(request));
    int error = is_finished(request) ? MPI_SUCCESS : progress(&request, 1, blocking, true);
    *flag = is_finished(request);
    if (!error && *flag) return retire(request, handle, status);
    unlist_one(request);
    return error;
}

int do_Wait(MPI_Request *request, MPI_Status *status) {
    int flag;
    return end_one(request, true, &flag, status);
}

int do_Test(MPI_Request *request, int *flag, MPI_Status *status) { return end_one(request, false, flag, status); }

int do_Request_get_status(Request *request, int *flag, MPI_Status *status) {
    *flag = 1;
    if (is_idle(request)) {
        set_empty_status(status);
        return MPI_SUCCESS;
    }
    if (!is_finished(request)) TRY(progress(&request, 1, false, true));
    *flag = is_finished(request);
    return *flag ? tell_status(request, status) : MPI_SUCCESS;
}

/* A send, of which nothing is left to be done here but to know when it is over. One to be cancelled may never be. */
static bool is_wanted_send(const Request *request) {
    bool is_send = request->is_cancellable && !request->finish && !request->one.landing.type;
    return is_send && request->num_steps == 1 && !request->is_unwanted;
}

/* The program does not ask for it any more, but it goes on. */
static int orphan(Request *request) {
    if (is_wanted_send(request)) return adopt_send(request);
    carry_on(request);
    return MPI_SUCCESS;
}

int do_Request_free(MPI_Request *handle) {
    Request *request;
    TRY(find_request(*handle, &request));
    if (!request) return fail(MPI_ERR_REQUEST, "MPI_REQUEST_NULL cannot be freed");
    *handle = MPI_REQUEST_NULL;
    if (request->is_shared) return MPI_SUCCESS;
    int error = request->generalized ? free_generalized(request) : MPI_SUCCESS;
    if (!error && !request->generalized && !is_idle(request) && !is_finished(request)) error = orphan(request);
    free_handle(request);
    return error;
}

int do_Cancel(MPI_Request *handle) {
    Request *request;
    TRY(find_request(*handle, &request));
    if (is_idle(request)) return fail(MPI_ERR_REQUEST,
                                      "the request is null or inactive: there is nothing to be cancelled");
    if (request->generalized) return cancel_generalized(request);
    if (!request->is_cancellable && !request->is_shared)
        return fail(MPI_ERR_REQUEST, "only sends, receives and generalized requests can be cancelled");
    if (!request->is_shared) request->is_unwanted = true;
    for (int i = 0; i < request->num_steps; i++)
        if (request->steps[i].operation.number) TRY(lower_cancel(request->steps[i].operation.number));
    return MPI_SUCCESS;
}

/* ---- Any ---- */

static int end_any(int count, MPI_Request handles[], bool blocking, int *index, int *flag, MPI_Status *status) {
    List list;
    TRY(list_begin(&list, count, handles, true));
    *index = MPI_UNDEFINED;
    *flag = list.count == 0;
    if (*flag) set_empty_status(status);
    int error = *flag ? MPI_SUCCESS : list_progress(&list, blocking, false);
    for (int i = 0; !error && !*flag && i < list.count; i++) {
        if (!is_finished(list.requests[i])) continue;
        *index = list.places[i];
        *flag = 1;
        error = retire_listed(&list, i, handles, status);
    }
    list_end(&list);
    return error;
}

int do_Waitany(int count, MPI_Request array_of_requests[], int *index, MPI_Status *status) {
    int flag;
    return end_any(count, array_of_requests, true, index, &flag, status);
}

int do_Testany(int count, MPI_Request array_of_requests[], int *index, int *flag, MPI_Status *status) {
    return end_any(count, array_of_requests, false, index, flag, status);
}

int do_Request_get_status_any(int count, const MPI_Request array_of_requests[], int *index, int *flag,
                              MPI_Status *status) {
    List list;
    TRY(list_begin(&list, count, array_of_requests, false));
    *index = MPI_UNDEFINED;
    *flag = list.count == 0;
    if (*flag) set_empty_status(status);
    int error = *flag ? MPI_SUCCESS : list_progress(&list, false, false);
    for (int i = 0; !error && !*flag && i < list.count; i++) {
        if (!is_finished(list.requests[i])) continue;
        *index = list.places[i];
        *flag = 1;
        error = tell_status(list.requests[i], status);
    }
    list_end(&list);
    return error;
}

/* ---- All ---- */

static bool are_all_finished(const List *list) {
    for (int i = 0; i < list->count; i++)
        if (!is_finished(list->requests[i])) return false;
    return true;
}

/* Where errors are told in statuses, all statuses tell. */
static void set_errors(MPI_Status statuses[], int count, int error) {
    for (int i = 0; statuses != MPI_STATUSES_IGNORE && i < count; i++) statuses[i].MPI_ERROR = error;
}

static int end_all(int count, MPI_Request handles[], bool blocking, int *flag, MPI_Status statuses[]) {
    List list;
    TRY(list_begin(&list, count, handles, true));
    int error = list.count ? list_progress(&list, blocking, true) : MPI_SUCCESS;
    *flag = !error && are_all_finished(&list);
    if (*flag) {
        for (int i = 0; list.count < count && i < count; i++) set_empty_status(status_at(statuses, i));
        for (int i = 0; i < list.count; i++) {
            MPI_Status *status = status_at(statuses, list.places[i]);
            int ended = retire_listed(&list, i, handles, status);
            if (ended && !error) set_errors(statuses, count, MPI_SUCCESS);
            if (ended) error = MPI_ERR_IN_STATUS;
            if (ended && status != MPI_STATUS_IGNORE) status->MPI_ERROR = ended;
        }
    }
    list_end(&list);
    return error;
}

int do_Waitall(int count, MPI_Request array_of_requests[], MPI_Status array_of_statuses[]) {
    int flag;
    return end_all(count, array_of_requests, true, &flag, array_of_statuses);
}

int do_Testall(int count, MPI_Request array_of_requests[], int *flag, MPI_Status array_of_statuses[]) {
    return end_all(count, array_of_requests, false, flag, array_of_statuses);
}

int do_Request_get_status_all(int count, const MPI_Request array_of_requests[], int *flag,
                              MPI_Status array_of_statuses[]) {
    List list;
    TRY(list_begin(&list, count, array_of_requests, false));
    int error = list.count ? list_progress(&list, false, true) : MPI_SUCCESS;
    *flag = !error && are_all_finished(&list);
    for (int i = 0; *flag && list.count < count && i < count; i++) set_empty_status(status_at(array_of_statuses, i));
    for (int i = 0; *flag && !error && i < list.count; i++)
        error = tell_status(list.requests[i], status_at(array_of_statuses, list.places[i]));
    list_end(&list);
    return error;
}

/* ---- Some ---- */

static int end_some(int count, MPI_Request handles[], bool blocking, int *num_ended, int places[],
                    MPI_Status statuses[]) {
    List list;
    TRY(list_begin(&list, count, handles, true));
    int error = list.count ? list_progress(&list, blocking, false) : MPI_SUCCESS;
    *num_ended = list.count ? 0 : MPI_UNDEFINED;
    for (int i = 0, failed = 0; (!error || failed) && i < list.count; i++) {
        if (!is_finished(list.requests[i])) continue;
        MPI_Status *status = status_at(statuses, *num_ended);
        int ended = retire_listed(&list, i, handles, status);
        if (ended && !failed) set_errors(statuses, *num_ended, MPI_SUCCESS);
        if (ended) error = MPI_ERR_IN_STATUS, failed = 1;
        if (failed && status != MPI_STATUS_IGNORE) status->MPI_ERROR = ended;
        places[(*num_ended)++] = list.places[i];
    }
    list_end(&list);
    return error;
}

int do_Waitsome(int incount, MPI_Request array_of_requests[], int *outcount, int array_of_indices[],
                MPI_Status array_of_statuses[]) {
    return end_some(incount, array_of_requests, true, outcount, array_of_indices, array_of_statuses);
}

int do_Testsome(int incount, MPI_Request array_of_requests[], int *outcount, int array_of_indices[],
                MPI_Status array_of_statuses[]) {
    return end_some(incount, array_of_requests, false, outcount, array_of_indices, array_of_statuses);
}

int do_Request_get_status_some(int incount, const MPI_Request array_of_requests[], int *outcount,
                               int array_of_indices[],
                               MPI_Status array_of_statuses[]) {
    List list;
    TRY(list_begin(&list, incount, array_of_requests, false));
    int error = list.count ? list_progress(&list, false, false) : MPI_SUCCESS;
    *outcount = list.count ? 0 : MPI_UNDEFINED;
    for (int i = 0; !error && i < list.count; i++) {
        if (!is_finished(list.requests[i])) continue;
        error = tell_status(list.requests[i], status_at(array_of_statuses, *outcount));
        array_of_indices[(*outcount)++] = list.places[i];
    }
    list_end(&list);
    return error;
}
