/* Arrays of mpi_f08 that are not contiguous: copies of them, datatypes that lead to their elements, and their refusal. */
#include "descriptor.h"
#include <stdio.h>

/* ---- What a descriptor says ---- */

static ptrdiff_t length_of(const Descriptor *array, int dim) {
    return array->dims[dim].upper - array->dims[dim].lower + 1;
}

static ptrdiff_t bytes_of_stride(const Descriptor *array, int dim) {
    return array->dims[dim].stride * (array->span ? array->span : (ptrdiff_t)array->element_bytes);
}

/* In dims 0 to dim; none in dim -1. */
static MPI_Count num_elements(const Descriptor *array, int dim) {
    MPI_Count count = 1;
    for (int i = 0; i <= dim; i++) count *= length_of(array, i);
    return count;
}

/* An array without elements is, and one of assumed size, whose last dim has no length. */
static bool is_contiguous(const Descriptor *array) {
    ptrdiff_t expected = (ptrdiff_t)array->element_bytes;
    bool is_dense = true;
    for (int dim = 0; dim < array->num_dims; dim++) {
        ptrdiff_t length = length_of(array, dim);
        if (length <= 0) return true;
        if (length > 1 && bytes_of_stride(array, dim) != expected) is_dense = false;
        expected *= length;
    }
    return is_dense;
}

/* ---- Copies ---- */

typedef enum { GATHER, SPREAD } Way;

/* The elements of dims 0 to dim, in Fortran's order; the place behind the packed ones. */
static char *copy(const Descriptor *array, int dim, char *element, char *packed, Way way) {
    if (dim < 0) {
        if (way == GATHER) memcpy(packed, element, array->element_bytes);
        else memcpy(element, packed, array->element_bytes);
        return packed + array->element_bytes;
    }
    for (ptrdiff_t i = 0; i < length_of(array, dim); i++, element += bytes_of_stride(array, dim))
        packed = copy(array, dim - 1, element, packed, way);
    return packed;
}

void *gathered(const Descriptor *array) {
    if (is_contiguous(array)) return array->base;
    char *elements = array_of((size_t)num_elements(array, array->num_dims - 1), array->element_bytes);
    copy(array, array->num_dims - 1, array->base, elements, GATHER);
    return elements;
}

void spread(const Descriptor *array, void *elements, bool is_changed) {
    if (elements == array->base) return;
    if (is_changed) copy(array, array->num_dims - 1, array->base, elements, SPREAD);
    free(elements);
}

/* ---- Refusal ---- */

/* Always false. The error has words of its own, and goes where a function goes that is not carried. */
static bool refuse(const Descriptor *array, const char *call, const char *why, MPI_Fint *ierror) {
    char text[MPI_MAX_ERROR_STRING];
    int code;
    snprintf(text, sizeof text,
             "%s: an array section of %lld elements of %zu bytes in %d dims is not contiguous, and %s; "
             "give it a contiguous array",
             call, (long long)num_elements(array, array->num_dims - 1), array->element_bytes, array->num_dims, why);
    PMPI_Add_error_code(MPI_ERR_BUFFER, &code);
    PMPI_Add_error_string(code, text);
    PMPI_Comm_call_errhandler(MPI_COMM_SELF, code);
    tell(ierror, code);
    return false;
}

bool is_whole(const Descriptor *array, const char *call, MPI_Fint *ierror) {
    return is_contiguous(array) || refuse(array, call, "the call uses it after its return", ierror);
}

/* ---- Datatypes ---- */

/* What leads to the first `count` elements of dims 0 to dim; to be freed. */
static MPI_Datatype type_of_first(const Descriptor *array, int dim, MPI_Count count, MPI_Datatype element) {
    MPI_Datatype full, rest, made;
    if (dim < 0) {
        PMPI_Type_dup(element, &made);
        return made;
    }
    MPI_Count slab = num_elements(array, dim - 1);
    MPI_Aint stride = bytes_of_stride(array, dim);
    MPI_Datatype inner = type_of_first(array, dim - 1, slab, element);
    PMPI_Type_create_hvector_c(count / slab, 1, stride, inner, &full);
    PMPI_Type_free(&inner);
    if (count % slab == 0) return full;
    rest = type_of_first(array, dim - 1, count % slab, element);
    PMPI_Type_create_struct(2, (int[]){1, 1}, (MPI_Aint[]){0, (MPI_Aint)(count / slab) * stride},
                            (MPI_Datatype[]){full, rest}, &made);
    PMPI_Type_free(&full);
    PMPI_Type_free(&rest);
    return made;
}

/* An element is some of the datatype, or the datatype is some elements. */
static MPI_Datatype type_of_element(const Descriptor *array, MPI_Datatype datatype, MPI_Count size) {
    MPI_Datatype element;
    MPI_Count bytes = (MPI_Count)array->element_bytes;
    if (bytes % size == 0) PMPI_Type_contiguous_c(bytes / size, datatype, &element);
    else PMPI_Type_contiguous_c(bytes, MPI_BYTE, &element);
    return element;
}

bool find_block(Block *block, const Descriptor *array, const char *call, MPI_Fint *ierror) {
    MPI_Count size, lower, extent, true_lower, true_extent, bytes = (MPI_Count)array->element_bytes;
    if (is_contiguous(array) || block->count <= 0) return true;
    /* The call itself tells what is wrong with a datatype. */
    if (PMPI_Type_size_c(block->datatype, &size) || size == 0) return true;
    PMPI_Type_get_extent_c(block->datatype, &lower, &extent);
    PMPI_Type_get_true_extent_c(block->datatype, &true_lower, &true_extent);
    if (size != extent || size != true_extent || lower || true_lower)
        return refuse(array, call, "the datatype has gaps", ierror);
    MPI_Count count = block->count * size / bytes;
    if ((block->count * size) % bytes || (bytes % size && size % bytes))
        return refuse(array, call, "the datatype does not fill whole elements", ierror);
    if (count > num_elements(array, array->num_dims - 1))
        return refuse(array, call, "the count asks for more than its elements", ierror);
    MPI_Datatype element = type_of_element(array, block->datatype, size);
    *block = (Block){1, type_of_first(array, array->num_dims - 1, count, element), true};
    PMPI_Type_free(&element);
    PMPI_Type_commit(&block->datatype);
    return true;
}

void free_block(Block *block) {
    if (block->is_made) PMPI_Type_free(&block->datatype);
}
