/* Generalized requests: the program itself says when they are over. */
#include "request.h"

struct Generalized {
    MPI_Grequest_query_function *query;
    MPI_Grequest_free_function *free;
    MPI_Grequest_cancel_function *cancel;
    void *extra_state;
    bool is_fortran; /* the functions get all by reference, and give their errors so */
    atomic_bool is_complete;
    atomic_int num_ends; /* it goes when it is complete and its handle is gone: the second of both calls `free` */
};

static bool is_complete(Request *request) { return atomic_load(&request->generalized->is_complete); }

int do_Grequest_start(MPI_Grequest_query_function *query_fn, MPI_Grequest_free_function *free_fn,
                      MPI_Grequest_cancel_function *cancel_fn, void *extra_state, Request **request) {
    Request *made = make_request(NULL, 0);
    made->generalized = NEW(struct Generalized);
    *made->generalized = (struct Generalized){query_fn, free_fn, cancel_fn, extra_state, false, false, 0};
    made->is_over_elsewhere = is_complete;
    /* Of whoever completes it, who may be later than MPI_Request_free. */
    keep(made);
    *request = made;
    return MPI_SUCCESS;
}

/* ---- The program's functions, of both languages ---- */

static int call_query(const struct Generalized *own, MPI_Status *status) {
    typedef void Fortran(void *extra_state, MPI_Status *status, MPI_Fint *error);
    MPI_Fint error = MPI_SUCCESS;
    if (!own->query) return MPI_SUCCESS;
    if (!own->is_fortran) return own->query(own->extra_state, status);
    ((Fortran *)(void (*)(void))own->query)(own->extra_state, status, &error);
    return error;
}

static int call_free(const struct Generalized *own) {
    typedef void Fortran(void *extra_state, MPI_Fint *error);
    MPI_Fint error = MPI_SUCCESS;
    if (!own->free) return MPI_SUCCESS;
    if (!own->is_fortran) return own->free(own->extra_state);
    ((Fortran *)(void (*)(void))own->free)(own->extra_state, &error);
    return error;
}

static int call_cancel(const struct Generalized *own, int complete) {
    typedef void Fortran(void *extra_state, MPI_Fint *complete, MPI_Fint *error);
    MPI_Fint error = MPI_SUCCESS;
    if (!own->cancel) return MPI_SUCCESS;
    if (!own->is_fortran) return own->cancel(own->extra_state, complete);
    ((Fortran *)(void (*)(void))own->cancel)(own->extra_state, &complete, &error);
    return error;
}

void speak_fortran(Request *request) { request->generalized->is_fortran = true; }

/* ---- Its ends ---- */

/* One of both ends has come; the last one frees what is the program's. */
static int note_end(Request *request) {
    struct Generalized *generalized = request->generalized;
    if (atomic_fetch_add(&generalized->num_ends, 1) != 1) return MPI_SUCCESS;
    int error = call_free(generalized);
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
    MPI_Status own;
    MPI_Status *told = status == MPI_STATUS_IGNORE ? &own : status;
    set_empty_status(told);
    int error = call_query(request->generalized, told);
    return error ? fail(error, "the query function of a generalized request has returned %d", error) : MPI_SUCCESS;
}

int free_generalized(Request *request) { return note_end(request); }

int cancel_generalized(Request *request) {
    int error = call_cancel(request->generalized, is_complete(request));
    return error ? fail(error, "the cancel function of a generalized request has returned %d", error) : MPI_SUCCESS;
}
