/* What the entry points for Fortran of MPICH's face share. They are a library of their own, as MPICH's are, and call the
 * public functions of the other one, whose handles are Fortran's numbers but for those of files.
 */
#ifndef REMESH_MPIFORT_H
#define REMESH_MPIFORT_H

#include <mpi.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "fortran_shared.h"

/* What a profiler calls. */
#define OTHER_NAMES_OF_BUFFERS(name, parameters) \
    EXPORTED void pmpi_##name##_ parameters __attribute__((alias("mpi_" #name "_")));
/* And what the module mpi_f08 does, where it gives no descriptors. */
#define OTHER_NAMES(name, parameters)                                                               \
    OTHER_NAMES_OF_BUFFERS(name, parameters)                                                        \
    EXPORTED void mpi_##name##_f08_ parameters __attribute__((alias("mpi_" #name "_")));            \
    EXPORTED void pmpi_##name##_f08_ parameters __attribute__((alias("mpi_" #name "_")));

typedef enum {
    KIND_COMM, KIND_DATATYPE, KIND_ERRHANDLER, KIND_FILE, KIND_GROUP, KIND_INFO, KIND_MESSAGE, KIND_OP, KIND_REQUEST,
    KIND_SESSION, KIND_WIN
} ObjectKind;
typedef void Callback(void);

#define BITS(handle) ((uintptr_t)(handle))
#define NEW_ARRAY(type, count) ((type *)array_of((size_t)(count), sizeof(type)))

static inline uintptr_t handle_of_fortran(ObjectKind kind, MPI_Fint number) {
    return kind == KIND_FILE ? BITS(PMPI_File_f2c(number)) : (uintptr_t)number;
}
static inline MPI_Fint fortran_of(ObjectKind kind, uintptr_t handle) {
    return kind == KIND_FILE ? PMPI_File_c2f((MPI_File)handle) : (MPI_Fint)handle;
}

/* Zeros; the program ends where there is no memory. */
INTERNAL void *array_of(size_t count, size_t bytes_of_one);

/* fortran_mpich.c of the other library, for MPICH's own Fortran: attributes with the caller's view of a value. */
enum { AS_ADDRESS = 1, AS_INTEGER = 3 };
int MPII_Comm_set_attr(MPI_Comm comm, int keyval, void *value, int type);
int MPII_Comm_get_attr(MPI_Comm comm, int keyval, void *value, int *flag, int type);
int MPII_Type_set_attr(MPI_Datatype type, int keyval, void *value, int as);
int MPII_Type_get_attr(MPI_Datatype type, int keyval, void *value, int *flag, int as);
int MPII_Win_set_attr(MPI_Win win, int keyval, void *value, int type);
int MPII_Win_get_attr(MPI_Win win, int keyval, void *value, int *flag, int type);
void MPII_Keyval_set_proxy(int keyval, Callback *copy_proxy, Callback *delete_proxy);
void MPII_Grequest_set_lang_f77(MPI_Request request);

#endif
