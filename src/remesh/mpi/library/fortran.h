/* What the entry points for Fortran share. */
#ifndef REMESH_FORTRAN_H
#define REMESH_FORTRAN_H

#include "core.h"

#define EXPORTED __attribute__((visibility("default")))
/* What a profiler calls, and what Open MPI's module mpi_f08 does. */
#define OTHER_NAMES(name, parameters)                                                              \
    EXPORTED void pmpi_##name##_ parameters __attribute__((alias("mpi_" #name "_")));              \
    EXPORTED void ompi_##name##_f parameters __attribute__((alias("mpi_" #name "_")));

/* The longest text that a function gives, with its end. */
enum { MAX_TEXT = 8192 };

/* A predefined handle of Open MPI's by its number in mpif.h. */
typedef struct {
    ObjectKind kind;
    int number;
    void *handle;
} FortranNumber;
INTERNAL extern const FortranNumber fortran_numbers[];
INTERNAL extern const int num_fortran_numbers;

/* The C value that an address stands for: Fortran's constants are common blocks. */
INTERNAL void *buffer_of(void *buffer);
INTERNAL MPI_Status *status_of(MPI_Fint *status);
INTERNAL int *weights_of(MPI_Fint *weights);
/* A text without the blanks around it, to be freed. */
INTERNAL char *text_of_fortran(const char *text, size_t length);
/* Blanks behind it, if there is one. */
INTERNAL void text_to_fortran(bool is_there, const char *text, char *to, size_t length);
INTERNAL void count_from_one(int *indices, int count);
/* How many datatypes a call has that has one for each rank of a communicator, or each neighbour; none of what is sent in
 * place.
 */
typedef enum { SENT, RECEIVED } Side;
INTERNAL int num_types(MPI_Fint comm, bool is_near, Side side, void *buffer);

#endif
