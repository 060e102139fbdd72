/* What a program may ask of a datatype, and its life: size, bounds, name, commit, free, addresses. */
#include "datatype.h"

#include "layout.h"
#include "recipe.h"

void measure_type(Datatype *type) {
    const Layout *layout = type->layout;
    type->size = layout->size;
    type->true_lb = layout->first;
    type->true_extent = layout->end - layout->first;
    type->is_dense = layout->is_run && layout->first == 0 && type->extent == layout->size;
}

Datatype *clone_type(const Datatype *type) {
    Datatype *clone = make_object(KIND_DATATYPE, sizeof(Datatype));
    Object object = clone->object;
    *clone = *type;
    clone->object = object;
    clone->attributes = (Attributes){0};
    clone->name[0] = 0;
    keep_layout(clone->layout);
    if (clone->recipe) clone->recipe->references++;
    return clone;
}

/* ---- Its life ---- */

static int check_type(MPI_Datatype handle, Datatype **type) {
    *type = datatype_of(handle);
    if (*type) return MPI_SUCCESS;
    const char *words = handle == MPI_DATATYPE_NULL ? "datatype is MPI_DATATYPE_NULL" : "datatype is no such handle";
    return fail(MPI_ERR_TYPE, "%s", words);
}

int do_Type_commit(MPI_Datatype *datatype) {
    Datatype *type;
    TRY(check_type(*datatype, &type));
    type->is_committed = true;
    return MPI_SUCCESS;
}

int do_Type_free(MPI_Datatype *datatype) {
    Datatype *type;
    TRY(check_type(*datatype, &type));
    if (type->object.is_predefined) return fail(MPI_ERR_TYPE, "%s is predefined and cannot be freed", type->name);
    TRY(delete_attributes(&type->object, &type->attributes));
    free_handle(type);
    *datatype = MPI_DATATYPE_NULL;
    return MPI_SUCCESS;
}

int do_Type_dup(Datatype *oldtype, Datatype **newtype) {
    Datatype *copy = clone_type(oldtype);
    drop_recipe(copy->recipe);
    copy->recipe = make_recipe(MPI_COMBINER_DUP);
    add_type(copy->recipe, oldtype);
    int error = copy_attributes(&oldtype->object, &oldtype->attributes, &copy->attributes);
    if (error) {
        free_handle(copy);
        return error;
    }
    *newtype = copy;
    return MPI_SUCCESS;
}

/* ---- Names ---- */

int do_Type_set_name(Datatype *datatype, const char *type_name) {
    snprintf(datatype->name, sizeof datatype->name, "%s", type_name);
    return MPI_SUCCESS;
}

int do_Type_get_name(Datatype *datatype, char *type_name, int *resultlen) {
    *resultlen = sprintf(type_name, "%s", datatype ? datatype->name : "MPI_DATATYPE_NULL");
    return MPI_SUCCESS;
}

/* ---- Size and bounds ---- */

int do_Type_size(Datatype *datatype, MPI_Count *size) {
    *size = datatype->size;
    return MPI_SUCCESS;
}

int do_Type_size_x(Datatype *datatype, MPI_Count *size) { return do_Type_size(datatype, size); }

int do_Type_get_extent(Datatype *datatype, MPI_Count *lb, MPI_Count *extent) {
    *lb = datatype->lb;
    *extent = datatype->extent;
    return MPI_SUCCESS;
}

int do_Type_get_extent_x(Datatype *datatype, MPI_Count *lb, MPI_Count *extent) {
    return do_Type_get_extent(datatype, lb, extent);
}

int do_Type_get_true_extent(Datatype *datatype, MPI_Count *true_lb, MPI_Count *true_extent) {
    *true_lb = datatype->true_lb;
    *true_extent = datatype->true_extent;
    return MPI_SUCCESS;
}

int do_Type_get_true_extent_x(Datatype *datatype, MPI_Count *true_lb, MPI_Count *true_extent) {
    return do_Type_get_true_extent(datatype, true_lb, true_extent);
}

int do_Type_extent(Datatype *datatype, MPI_Aint *extent) {
    *extent = datatype->extent;
    return MPI_SUCCESS;
}

int do_Type_lb(Datatype *datatype, MPI_Aint *displacement) {
    *displacement = datatype->lb;
    return MPI_SUCCESS;
}

int do_Type_ub(Datatype *datatype, MPI_Aint *displacement) {
    *displacement = datatype->lb + datatype->extent;
    return MPI_SUCCESS;
}

MPI_Count count_values(const Datatype *type, int64_t num_bytes) {
    if (num_bytes == 0) return 0;
    if (type->size == 0) return MPI_UNDEFINED;
    MPI_Count rest = values_in(type->layout, num_bytes % type->size);
    return rest < 0 ? MPI_UNDEFINED : num_bytes / type->size * type->layout->num_values + rest;
}

/* ---- Addresses ---- */

int do_Get_address(const void *location, MPI_Aint *address) {
    *address = (MPI_Aint)location;
    return MPI_SUCCESS;
}

int do_Address(void *location, MPI_Aint *address) { return do_Get_address(location, address); }

MPI_Aint do_Aint_add(MPI_Aint base, MPI_Aint disp) { return (MPI_Aint)((uintptr_t)base + (uintptr_t)disp); }

MPI_Aint do_Aint_diff(MPI_Aint addr1, MPI_Aint addr2) { return (MPI_Aint)((uintptr_t)addr1 - (uintptr_t)addr2); }
