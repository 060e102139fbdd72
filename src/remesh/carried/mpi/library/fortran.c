/* Fortran without a library of the program's MPI: constants that are addresses, texts, and functions of the program's.
 *
 * The rest is made by fortran.py. Only Open MPI's face has it: programs compiled against MPICH bring their own library
 * (fortran_mpich.c).
 */
#include "core.h"

#if defined(FACE_OPENMPI)

#include "attributes.h"
#include "comm.h"
#include "errors.h"
#include "fortran.h"
#include "fortran_shared_entries.h"
#include "op.h"
#include "request.h"
#include "topology.h"
#include "win.h"

/* ---- Constants that are addresses ---- */

/* A program has common blocks of these names, which take the place of ours. */
EXPORTED MPI_Fint mpi_fortran_bottom_[16], mpi_fortran_in_place_[16], mpi_fortran_unweighted_[16];
EXPORTED MPI_Fint mpi_fortran_weights_empty_[16], mpi_fortran_status_ignore_[16], mpi_fortran_statuses_ignore_[16];
EXPORTED MPI_Fint mpi_fortran_errcodes_ignore_[16], mpi_fortran_argv_null_[16], mpi_fortran_argvs_null_[16];

void *buffer_of(void *buffer) {
    if (buffer == mpi_fortran_bottom_) return MPI_BOTTOM;
    return buffer == mpi_fortran_in_place_ ? MPI_IN_PLACE : buffer;
}

MPI_Status *status_of(MPI_Fint *status) {
    bool is_ignored = status == mpi_fortran_status_ignore_ || status == mpi_fortran_statuses_ignore_;
    return is_ignored ? MPI_STATUS_IGNORE : (MPI_Status *)(void *)status;
}

int *weights_of(MPI_Fint *weights) {
    if (weights == mpi_fortran_unweighted_) return MPI_UNWEIGHTED;
    return weights == mpi_fortran_weights_empty_ ? MPI_WEIGHTS_EMPTY : weights;
}

/* ---- Datatypes of a call ---- */

int num_types(MPI_Fint handle, bool is_near, Side side, void *buffer) {
    const Comm *comm = object_of(KIND_COMM, handle_of_fortran(KIND_COMM, handle));
    bool is_none = !comm || (is_near && !comm->topology) || (side == SENT && buffer_of(buffer) == MPI_IN_PLACE);
    if (is_none) return 0;
    if (!is_near) return num_peers(comm);
    return side == SENT ? comm->topology->destinations.count : comm->topology->sources.count;
}

/* ---- Numbers of handles ---- */

bool number_of_predefined(ObjectKind kind, uintptr_t handle, MPI_Fint *number) {
    for (int i = 0; i < num_fortran_numbers; i++) {
        if (fortran_numbers[i].kind != kind || BITS(fortran_numbers[i].handle) != handle) continue;
        *number = fortran_numbers[i].number;
        return true;
    }
    return false;
}

uintptr_t predefined_of_number(ObjectKind kind, MPI_Fint number) {
    for (int i = 0; i < num_fortran_numbers; i++)
        if (fortran_numbers[i].kind == kind && fortran_numbers[i].number == number) return BITS(fortran_numbers[i].handle);
    return 0;
}

/* ---- Operations and error handlers of the program's ---- */

static void call_op(const Op *op, void *in, void *inout, int count, Datatype *type) {
    typedef void Function(void *in, void *inout, MPI_Fint *count, MPI_Fint *type);
    MPI_Fint length = count, number = fortran_of(KIND_DATATYPE, type->object.handle);
    ((Function *)(void (*)(void))op->function)(in, inout, &length, &number);
}

EXPORTED void mpi_op_create_(Callback *function, const MPI_Fint *commute, MPI_Fint *op, MPI_Fint *ierror);
void mpi_op_create_(Callback *function, const MPI_Fint *commute, MPI_Fint *op, MPI_Fint *ierror) {
    MPI_Op made;
    *ierror = PMPI_Op_create((MPI_User_function *)function, *commute, &made);
    if (*ierror) return;
    op_of(made)->call = call_op;
    *op = fortran_of(KIND_OP, BITS(made));
}
OTHER_NAMES(op_create, (Callback *function, const MPI_Fint *commute, MPI_Fint *op, MPI_Fint *ierror))

static void call_handler(const Errhandler *handler, uintptr_t handle, int *error) {
    typedef void Function(MPI_Fint *handle, MPI_Fint *error);
    MPI_Fint number = fortran_of(handler->holder, handle);
    ((Function *)handler->function)(&number, error);
}

#define ERRHANDLER_OF(name, Name)                                                                          \
    EXPORTED void mpi_##name##_create_errhandler_(Callback *function, MPI_Fint *handler, MPI_Fint *ierror); \
    void mpi_##name##_create_errhandler_(Callback *function, MPI_Fint *handler, MPI_Fint *ierror) {        \
        MPI_Errhandler made;                                                                               \
        *ierror = PMPI_##Name##_create_errhandler((MPI_##Name##_errhandler_function *)function, &made);    \
        if (*ierror) return;                                                                               \
        errhandler_of(made)->call = call_handler;                                                          \
        *handler = fortran_of(KIND_ERRHANDLER, BITS(made));                                                \
    }                                                                                                      \
    OTHER_NAMES(name##_create_errhandler, (Callback *function, MPI_Fint *handler, MPI_Fint *ierror))
ERRHANDLER_OF(comm, Comm)
ERRHANDLER_OF(win, Win)
ERRHANDLER_OF(file, File)

/* ---- Attributes: values are integers of the size of an address ---- */

static int call_copy(const KeyvalFunctions *own, Object *of, int keyval, Language set_in, void *value, void **copied,
                     int *flag) {
    (void)set_in;
    typedef void Function(MPI_Fint *of, MPI_Fint *keyval, void *extra, void *value, void *copied, MPI_Fint *flag,
                          MPI_Fint *error);
    MPI_Fint number = fortran_of(of->kind, of->handle), error = MPI_SUCCESS;
    ((Function *)own->copy)(&number, &keyval, (void *)&own->extra_state, &value, copied, flag, &error);
    return error;
}

static int call_delete(const KeyvalFunctions *own, Object *of, int keyval, Language set_in, void *value) {
    (void)set_in;
    typedef void Function(MPI_Fint *of, MPI_Fint *keyval, void *value, void *extra, MPI_Fint *error);
    MPI_Fint number = fortran_of(of->kind, of->handle), error = MPI_SUCCESS;
    ((Function *)own->delete)(&number, &keyval, &value, (void *)&own->extra_state, &error);
    return error;
}

#define ATTRIBUTES_OF(name, KIND, Handle)                                                                            \
    EXPORTED void mpi_##name##_create_keyval_(Callback *copy, Callback *delete, MPI_Fint *keyval, void **extra,     \
                                              MPI_Fint *ierror);                                                    \
    void mpi_##name##_create_keyval_(Callback *copy, Callback *delete, MPI_Fint *keyval, void **extra,              \
                                     MPI_Fint *ierror) {                                                            \
        KeyvalFunctions functions = {copy, delete, *extra, call_copy, call_delete, NULL, NULL};                     \
        *ierror = create_keyval(KIND, functions, keyval);                                                           \
    }                                                                                                               \
    OTHER_NAMES(name##_create_keyval, (Callback *copy, Callback *delete, MPI_Fint *keyval, void **extra,            \
                                       MPI_Fint *ierror))                                                           \
    EXPORTED void mpi_##name##_set_attr_(MPI_Fint *of, MPI_Fint *keyval, void **value, MPI_Fint *ierror);           \
    void mpi_##name##_set_attr_(MPI_Fint *of, MPI_Fint *keyval, void **value, MPI_Fint *ierror) {                   \
        *ierror = set_##name##_attribute((Handle)handle_of_fortran(KIND, *of), *keyval, IN_FORTRAN, *value);        \
    }                                                                                                               \
    OTHER_NAMES(name##_set_attr, (MPI_Fint *of, MPI_Fint *keyval, void **value, MPI_Fint *ierror))                  \
    EXPORTED void mpi_##name##_get_attr_(MPI_Fint *of, MPI_Fint *keyval, MPI_Aint *value, MPI_Fint *flag,           \
                                         MPI_Fint *ierror);                                                         \
    void mpi_##name##_get_attr_(MPI_Fint *of, MPI_Fint *keyval, MPI_Aint *value, MPI_Fint *flag,                    \
                                MPI_Fint *ierror) {                                                                 \
        void *found;                                                                                                \
        *ierror = get_##name##_attribute((Handle)handle_of_fortran(KIND, *of), *keyval, IN_FORTRAN, &found, flag);  \
        if (!*ierror && *flag) *value = (MPI_Aint)found;                                                            \
    }                                                                                                               \
    OTHER_NAMES(name##_get_attr, (MPI_Fint *of, MPI_Fint *keyval, MPI_Aint *value, MPI_Fint *flag, MPI_Fint *ierror))
ATTRIBUTES_OF(comm, KIND_COMM, MPI_Comm)
ATTRIBUTES_OF(type, KIND_DATATYPE, MPI_Datatype)
ATTRIBUTES_OF(win, KIND_WIN, MPI_Win)

/* ---- Generalized requests ---- */

EXPORTED void mpi_grequest_start_(Callback *query, Callback *release, Callback *cancel, void *extra, MPI_Fint *request,
                                  MPI_Fint *ierror);
void mpi_grequest_start_(Callback *query, Callback *release, Callback *cancel, void *extra, MPI_Fint *request,
                         MPI_Fint *ierror) {
    MPI_Request made;
    *ierror = PMPI_Grequest_start((MPI_Grequest_query_function *)query, (MPI_Grequest_free_function *)release,
                                  (MPI_Grequest_cancel_function *)cancel, extra, &made);
    if (*ierror) return;
    speak_fortran(request_of(made));
    *request = fortran_of(KIND_REQUEST, BITS(made));
}
OTHER_NAMES(grequest_start, (Callback *query, Callback *release, Callback *cancel, void *extra, MPI_Fint *request,
                             MPI_Fint *ierror))

#endif
