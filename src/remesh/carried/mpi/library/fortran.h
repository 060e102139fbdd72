/* What the entry points for Fortran share. */
#ifndef REMESH_FORTRAN_H
#define REMESH_FORTRAN_H

#include "core.h"
#include "fortran_shared.h"

/* What a profiler calls, and what Open MPI's module mpi_f08 does. */
#define OTHER_NAMES(name, parameters)                                                              \
    EXPORTED void pmpi_##name##_ parameters __attribute__((alias("mpi_" #name "_")));              \
    EXPORTED void ompi_##name##_f parameters __attribute__((alias("mpi_" #name "_")));
#define OTHER_NAMES_OF_BUFFERS OTHER_NAMES

/* A predefined handle of Open MPI's by its number in mpif.h. */
typedef struct {
    ObjectKind kind;
    int number;
    void *handle;
} FortranNumber;
INTERNAL extern const FortranNumber fortran_numbers[];
INTERNAL extern const int num_fortran_numbers;

#endif
