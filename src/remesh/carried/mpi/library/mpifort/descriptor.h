/* How does C see an array that a program of mpi_f08 gives to MPI? By gfortran's descriptor, which need not be contiguous.
 *
 * A call that is over when it returns gets a contiguous copy. One that goes on behind its return, and has one count and one
 * datatype for an array, gets a datatype that leads to its elements. All others are refused.
 */
#ifndef REMESH_DESCRIPTOR_H
#define REMESH_DESCRIPTOR_H

#include "fortran.h"

/* A fact of gfortran's binary interface, since GCC 8. */
typedef struct {
    char *base; /* of the first element, also where a stride is negative */
    size_t offset;
    size_t element_bytes;
    int version;
    signed char num_dims, type;
    short attribute;
    ptrdiff_t span; /* the unit of strides, in bytes */
    struct {
        ptrdiff_t stride, lower, upper;
    } dims[15];
} Descriptor;

/* The array itself, or a copy of its elements that `spread` frees. */
INTERNAL void *gathered(const Descriptor *array);
/* Writes a copy back, if the call has changed it. */
INTERNAL void spread(const Descriptor *array, void *elements, bool is_changed);

/* As many elements of an array as a call asks for. */
typedef struct {
    MPI_Count count;
    MPI_Fint datatype;
    bool is_made;
} Block;

/* False after an error, which has been told. */
INTERNAL bool find_block(Block *block, const Descriptor *array, const char *call, MPI_Fint *ierror);
INTERNAL void free_block(Block *block);
/* False, and the error has been told, unless it is contiguous. */
INTERNAL bool is_whole(const Descriptor *array, const char *call, MPI_Fint *ierror);

#endif
