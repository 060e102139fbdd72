/* The copy and delete functions that a face exports for programs to name: the values of MPI_COMM_DUP_FN and its like.
 * Other faces have numbers for them, or some of them, which attributes.c knows.
 */
#include "core.h"

#define COPY_FN(name, Handle, copies)                                                                             \
    EXPORTED int name(Handle object, int keyval, void *extra_state, void *value, void *copied, int *flag);        \
    int name(Handle object, int keyval, void *extra_state, void *value, void *copied, int *flag) {                \
        (void)object, (void)keyval, (void)extra_state;                                                            \
        *flag = (copies);                                                                                         \
        if (copies) *(void **)copied = value;                                                                     \
        return MPI_SUCCESS;                                                                                       \
    }
#define DELETE_FN(name, Handle)                                                                                   \
    EXPORTED int name(Handle object, int keyval, void *value, void *extra_state);                                 \
    int name(Handle object, int keyval, void *value, void *extra_state) {                                         \
        (void)object, (void)keyval, (void)value, (void)extra_state;                                               \
        return MPI_SUCCESS;                                                                                       \
    }

#if defined(FACE_MPICH)
/* All handles are integers, so one function serves all kinds. */
COPY_FN(MPIR_Dup_fn, int, true)
#elif defined(FACE_OPENMPI)
COPY_FN(OMPI_C_MPI_DUP_FN, MPI_Comm, true)
COPY_FN(OMPI_C_MPI_COMM_DUP_FN, MPI_Comm, true)
COPY_FN(OMPI_C_MPI_TYPE_DUP_FN, MPI_Datatype, true)
COPY_FN(OMPI_C_MPI_WIN_DUP_FN, MPI_Win, true)
COPY_FN(OMPI_C_MPI_NULL_COPY_FN, MPI_Comm, false)
COPY_FN(OMPI_C_MPI_COMM_NULL_COPY_FN, MPI_Comm, false)
COPY_FN(OMPI_C_MPI_TYPE_NULL_COPY_FN, MPI_Datatype, false)
COPY_FN(OMPI_C_MPI_WIN_NULL_COPY_FN, MPI_Win, false)
DELETE_FN(OMPI_C_MPI_NULL_DELETE_FN, MPI_Comm)
DELETE_FN(OMPI_C_MPI_COMM_NULL_DELETE_FN, MPI_Comm)
DELETE_FN(OMPI_C_MPI_TYPE_NULL_DELETE_FN, MPI_Datatype)
DELETE_FN(OMPI_C_MPI_WIN_NULL_DELETE_FN, MPI_Win)
#endif
