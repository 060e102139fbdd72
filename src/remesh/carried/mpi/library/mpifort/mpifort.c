/* Fortran for MPICH's face without MPICH's own library: constants that are addresses, texts, and functions of the program's.
 *
 * The rest is made by fortran.py. Operations and error handlers are called with addresses of integers in C and in
 * Fortran, so nothing stands between.
 */
#include "fortran.h"
#include "fortran_shared_entries.h"
#include <stdio.h>

void *array_of(size_t count, size_t bytes_of_one) {
    void *made = calloc(count ? count : 1, bytes_of_one);
    if (made) return made;
    fprintf(stderr, "calling MPI from Fortran: no memory for %zu handles or letters\n", count);
    abort();
}

/* ---- Constants that are addresses ---- */

/* A program has common blocks and variables of these names, which take the place of ours: those of mpif.h. */
typedef struct {
    MPI_Fint bottom, in_place, status_ignore[5];
} FirstConstants;
typedef struct {
    MPI_Fint statuses_ignore[5], errcodes_ignore;
} SecondConstants;
EXPORTED FirstConstants mpipriv1_;
EXPORTED SecondConstants mpipriv2_;
EXPORTED char mpiprivc_[2];
EXPORTED MPI_Fint mpifcmb5_, mpifcmb9_; /* MPI_UNWEIGHTED, MPI_WEIGHTS_EMPTY */
/* Those of mpi_f08. */
EXPORTED MPI_Fint MPIR_F08_MPI_BOTTOM, MPIR_F08_MPI_IN_PLACE;
EXPORTED MPI_Fint MPIR_F08_MPI_STATUS_IGNORE_OBJ[5], MPIR_F08_MPI_STATUSES_IGNORE_OBJ[5];
#define OF_F08(name) __mpi_f08_link_constants_MOD_mpi_##name
EXPORTED MPI_Fint OF_F08(unweighted), OF_F08(weights_empty), OF_F08(errcodes_ignore);
EXPORTED char OF_F08(argv_null), OF_F08(argvs_null);

void *buffer_of(void *buffer) {
    if (buffer == &mpipriv1_.bottom || buffer == &MPIR_F08_MPI_BOTTOM) return MPI_BOTTOM;
    return buffer == &mpipriv1_.in_place || buffer == &MPIR_F08_MPI_IN_PLACE ? MPI_IN_PLACE : buffer;
}

MPI_Status *status_of(MPI_Fint *status) {
    bool is_ignored = status == mpipriv1_.status_ignore || status == mpipriv2_.statuses_ignore ||
                      status == MPIR_F08_MPI_STATUS_IGNORE_OBJ || status == MPIR_F08_MPI_STATUSES_IGNORE_OBJ;
    return is_ignored ? MPI_STATUS_IGNORE : (MPI_Status *)(void *)status;
}

int *weights_of(MPI_Fint *weights) {
    if (weights == &mpifcmb5_ || weights == &OF_F08(unweighted)) return MPI_UNWEIGHTED;
    return weights == &mpifcmb9_ || weights == &OF_F08(weights_empty) ? MPI_WEIGHTS_EMPTY : weights;
}

/* ---- Datatypes of a call ---- */

static int num_neighbours(MPI_Comm comm, Side side) {
    int kind, num_sources = 0, num_destinations = 0, is_weighted, num_dims = 0, rank;
    if (PMPI_Topo_test(comm, &kind)) return 0;
    if (kind == MPI_DIST_GRAPH) {
        PMPI_Dist_graph_neighbors_count(comm, &num_sources, &num_destinations, &is_weighted);
    } else if (kind == MPI_CART) {
        PMPI_Cartdim_get(comm, &num_dims);
        num_sources = num_destinations = 2 * num_dims;
    } else if (kind == MPI_GRAPH) {
        PMPI_Comm_rank(comm, &rank);
        PMPI_Graph_neighbors_count(comm, rank, &num_sources);
        num_destinations = num_sources;
    }
    return side == SENT ? num_destinations : num_sources;
}

int num_types(MPI_Fint comm, bool is_near, Side side, void *buffer) {
    int size = 0, is_between = 0;
    if (side == SENT && buffer_of(buffer) == MPI_IN_PLACE) return 0;
    if (is_near) return num_neighbours(comm, side);
    /* An error is told by the call that this is for. */
    if (comm == MPI_COMM_NULL || PMPI_Comm_test_inter(comm, &is_between)) return 0;
    if (is_between) PMPI_Comm_remote_size(comm, &size);
    else PMPI_Comm_size(comm, &size);
    return size;
}

/* ---- Operations and error handlers ---- */

EXPORTED void mpi_op_create_(Callback *function, const MPI_Fint *commute, MPI_Fint *op, MPI_Fint *ierror);
void mpi_op_create_(Callback *function, const MPI_Fint *commute, MPI_Fint *op, MPI_Fint *ierror) {
    tell(ierror, PMPI_Op_create((MPI_User_function *)function, *commute, op));
}
OTHER_NAMES(op_create, (Callback *function, const MPI_Fint *commute, MPI_Fint *op, MPI_Fint *ierror))

#define ERRHANDLER_OF(name, Name)                                                                           \
    EXPORTED void mpi_##name##_create_errhandler_(Callback *function, MPI_Fint *handler, MPI_Fint *ierror); \
    void mpi_##name##_create_errhandler_(Callback *function, MPI_Fint *handler, MPI_Fint *ierror) {         \
        tell(ierror, PMPI_##Name##_create_errhandler((MPI_##Name##_errhandler_function *)function, handler)); \
    }                                                                                                       \
    OTHER_NAMES(name##_create_errhandler, (Callback *function, MPI_Fint *handler, MPI_Fint *ierror))
ERRHANDLER_OF(comm, Comm)
ERRHANDLER_OF(session, Session)
ERRHANDLER_OF(win, Win)
/* Its old name. */
EXPORTED __typeof__(mpi_comm_create_errhandler_) mpi_errhandler_create_
    __attribute__((alias("mpi_comm_create_errhandler_")));

/* A file is no integer in C, so one function stands between each handler of the program's and C. */
enum { MOST_FILE_HANDLERS = 8 };
typedef void FileHandler(MPI_Fint *file, MPI_Fint *error);
static FileHandler *file_handlers[MOST_FILE_HANDLERS];
#define CALL_FILE_HANDLER(n)                                     \
    static void call_file_handler_##n(MPI_File *file, int *error, ...) { \
        MPI_Fint number = PMPI_File_c2f(*file);                  \
        file_handlers[n](&number, error);                        \
    }
CALL_FILE_HANDLER(0)
CALL_FILE_HANDLER(1)
CALL_FILE_HANDLER(2)
CALL_FILE_HANDLER(3)
CALL_FILE_HANDLER(4)
CALL_FILE_HANDLER(5)
CALL_FILE_HANDLER(6)
CALL_FILE_HANDLER(7)
static MPI_File_errhandler_function *const call_file_handler[MOST_FILE_HANDLERS] = {
    call_file_handler_0, call_file_handler_1, call_file_handler_2, call_file_handler_3,
    call_file_handler_4, call_file_handler_5, call_file_handler_6, call_file_handler_7};

EXPORTED void mpi_file_create_errhandler_(FileHandler *function, MPI_Fint *handler, MPI_Fint *ierror);
void mpi_file_create_errhandler_(FileHandler *function, MPI_Fint *handler, MPI_Fint *ierror) {
    int place = 0;
    while (place < MOST_FILE_HANDLERS && file_handlers[place] && file_handlers[place] != function) place++;
    if (place == MOST_FILE_HANDLERS) {
        tell(ierror, MPI_ERR_NO_MEM);
        return;
    }
    file_handlers[place] = function;
    tell(ierror, PMPI_File_create_errhandler(call_file_handler[place], handler));
}
OTHER_NAMES(file_create_errhandler, (FileHandler *function, MPI_Fint *handler, MPI_Fint *ierror))

/* ---- Attributes: values are integers of the size of an address ---- */

static int call_copy(Callback *copy, int handle, int keyval, void *extra, int type, void *value, void **copied, int *flag) {
    typedef void Function(MPI_Fint *of, MPI_Fint *keyval, void *extra, void *value, void *copied, MPI_Fint *flag,
                          MPI_Fint *error);
    MPI_Fint error = MPI_SUCCESS;
    (void)type;
    ((Function *)copy)(&handle, &keyval, &extra, &value, copied, flag, &error);
    return error;
}

static int call_delete(Callback *delete, int handle, int keyval, int type, void *value, void *extra) {
    typedef void Function(MPI_Fint *of, MPI_Fint *keyval, void *value, void *extra, MPI_Fint *error);
    MPI_Fint error = MPI_SUCCESS;
    (void)type;
    ((Function *)delete)(&handle, &keyval, &value, &extra, &error);
    return error;
}

#define ATTRIBUTES_OF(name, Name)                                                                                  \
    EXPORTED void mpi_##name##_create_keyval_(Callback *copy, Callback *delete, MPI_Fint *keyval, void **extra,    \
                                              MPI_Fint *ierror);                                                   \
    void mpi_##name##_create_keyval_(Callback *copy, Callback *delete, MPI_Fint *keyval, void **extra,             \
                                     MPI_Fint *ierror) {                                                           \
        int error = PMPI_##Name##_create_keyval((MPI_##Name##_copy_attr_function *)copy,                           \
                                                (MPI_##Name##_delete_attr_function *)delete, keyval, *extra);      \
        if (!tell(ierror, error)) MPII_Keyval_set_proxy(*keyval, (Callback *)call_copy, (Callback *)call_delete);  \
    }                                                                                                              \
    OTHER_NAMES(name##_create_keyval, (Callback *copy, Callback *delete, MPI_Fint *keyval, void **extra,           \
                                       MPI_Fint *ierror))                                                          \
    EXPORTED void mpi_##name##_set_attr_(MPI_Fint *of, MPI_Fint *keyval, void **value, MPI_Fint *ierror);          \
    void mpi_##name##_set_attr_(MPI_Fint *of, MPI_Fint *keyval, void **value, MPI_Fint *ierror) {                  \
        tell(ierror, MPII_##Name##_set_attr(*of, *keyval, *value, AS_ADDRESS));                                    \
    }                                                                                                              \
    OTHER_NAMES(name##_set_attr, (MPI_Fint *of, MPI_Fint *keyval, void **value, MPI_Fint *ierror))                 \
    EXPORTED void mpi_##name##_get_attr_(MPI_Fint *of, MPI_Fint *keyval, MPI_Aint *value, MPI_Fint *flag,          \
                                         MPI_Fint *ierror);                                                        \
    void mpi_##name##_get_attr_(MPI_Fint *of, MPI_Fint *keyval, MPI_Aint *value, MPI_Fint *flag,                   \
                                MPI_Fint *ierror) {                                                                \
        MPI_Aint found = 0;                                                                                        \
        int error = MPII_##Name##_get_attr(*of, *keyval, &found, flag, AS_ADDRESS);                                \
        if (!tell(ierror, error) && *flag) *value = found;                                                         \
    }                                                                                                              \
    OTHER_NAMES(name##_get_attr, (MPI_Fint *of, MPI_Fint *keyval, MPI_Aint *value, MPI_Fint *flag, MPI_Fint *ierror))
ATTRIBUTES_OF(comm, Comm)
ATTRIBUTES_OF(type, Type)
ATTRIBUTES_OF(win, Win)

/* The module mpi_f08 has the functions that a program names instead of its own under other names. */
#define NAME_OF_F08(name) \
    EXPORTED __typeof__(mpi_##name##_) __mpi_f08_callbacks_MOD_mpi_##name __attribute__((alias("mpi_" #name "_")));
NAME_OF_F08(comm_dup_fn)
NAME_OF_F08(type_dup_fn)
NAME_OF_F08(win_dup_fn)
NAME_OF_F08(comm_null_copy_fn)
NAME_OF_F08(type_null_copy_fn)
NAME_OF_F08(win_null_copy_fn)
NAME_OF_F08(comm_null_delete_fn)
NAME_OF_F08(type_null_delete_fn)
NAME_OF_F08(win_null_delete_fn)

/* ---- Generalized requests ---- */

EXPORTED void mpi_grequest_start_(Callback *query, Callback *release, Callback *cancel, void *extra, MPI_Fint *request,
                                  MPI_Fint *ierror);
void mpi_grequest_start_(Callback *query, Callback *release, Callback *cancel, void *extra, MPI_Fint *request,
                         MPI_Fint *ierror) {
    int error = PMPI_Grequest_start((MPI_Grequest_query_function *)query, (MPI_Grequest_free_function *)release,
                                    (MPI_Grequest_cancel_function *)cancel, extra, request);
    if (!tell(ierror, error)) MPII_Grequest_set_lang_f77(*request);
}
OTHER_NAMES(grequest_start, (Callback *query, Callback *release, Callback *cancel, void *extra, MPI_Fint *request,
                             MPI_Fint *ierror))
