/* Generalized requests: the program itself says when they are over. */
#include "request.h"

struct Generalized {
    MPI_Grequest_query_function *query;
    MPI_Grequest_free_function *free;
    MPI_Grequest_cancel_function *cancel;
    void *extra_state;
    atomic_bool is_complete;
    atomic_int num_ends; /* it goes when it is complete and its handle is gone: the second of both calls `free` */
};

static bool is_complete(Request *request) { return atomic_load(&request->generalized->is_complete); }

int do_Grequest_start(MPI_Grequest_query_function *query_fn, MPI_Grequest_free_function *free_fn,
                      MPI_Grequest_cancel_function *cancel_fn, void *extra_state, Request **request) {
    Request *made = make_request(NULL, 0);
    made->generalized = NEW(struct Generalized);
    *made->generalized = (struct Generalized){query_fn, free_fn, cancel_fn, extra_state, false, 0};
    made->is_over_elsewhere = is_complete;
    /* Of whoever completes it, who may be later than MPI_Request_free. */
    keep(made);
    *request = made;
    return MPI_SUCCESS;
}

/* One of both ends has come; the last one frees what is the program's. */
static int note_end(Request *request) {
    struct Generalized *generalized = request->generalized;
    if (atomic_fetch_add(&generalized->num_ends, 1) != 1 || !generalized->free) return MPI_SUCCESS;
    int error = generalized->free(generalized->extra_state);
    return error ? fail(error, "the free function of a generalized request has returned %d", error) : MPI_SUCCESS;
}

int do_Grequest_complete(Request *request) {
    struct Generalized *generalized = request->generalized;
    if (!generalized) return fail(MPI_ERR_REQUEST, "the request is no generalized one");
    if (atomic_exchange(&generalized->is_complete, true)) return fail(MPI_ERR_REQUEST,
                                                                      "the request is complete already");
    int error = note_end(request);
    let_go(request);
    return error;
}

int query_generalized(Request *request, MPI_Status *status) {
    struct Generalized *generalized = request->generalized;
    MPI_Status own;
    MPI_Status *told = status == MPI_STATUS_IGNORE ? &own : status;
    set_empty_status(told);
    int error = generalized->query ? generalized->query(generalized->extra_state, told) : MPI_SUCCESS;
    return error ? fail(error, "the query function of a generalized request has returned %d", error) : MPI_SUCCESS;
}

int free_generalized(Request *request) { return note_end(request); }

int cancel_generalized(Request *request) {
    struct Generalized *generalized = request->generalized;
    if (!generalized->cancel) return MPI_SUCCESS;
    int error = generalized->cancel(generalized->extra_state, is_complete(request));
    return error ? fail(error, "the cancel function of a generalized request has returned %d", error) : MPI_SUCCESS;
}
