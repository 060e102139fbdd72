/* Datatypes of parts of arrays: a box, and what a process holds of an array that is distributed over a grid.
 *
 * Both go from the dimension that varies fastest to the slowest: what is chosen of a dimension are parts, each of which
 * is a copy of what has been chosen of the faster ones. The whole begins at 0 and is as large as the array. Source: MPI
 * 4.1, sections 5.1.3 and 5.1.4.
 */
#include "layout.h"
#include "recipe.h"

/* What has been chosen so far, and how far apart two indices of the next dimension are. */
typedef struct {
    Layout *layout;
    MPI_Aint stride;
} Chosen;

static void choose(Chosen *chosen, PartList parts, MPI_Count size) {
    Layout *layout = layout_of_parts(parts.num_parts, parts.parts);
    drop_layout(chosen->layout);
    chosen->layout = layout;
    chosen->stride *= size;
}

static Datatype *array_type(const Chosen *chosen, const Datatype *old, Recipe *recipe) {
    Datatype *type = make_object(KIND_DATATYPE, sizeof(Datatype));
    type->layout = chosen->layout;
    type->recipe = recipe;
    type->basic = old->basic;
    type->alignment = old->alignment;
    type->extent = chosen->stride;
    type->has_lb = type->has_ub = true;
    measure_type(type);
    return type;
}

/* The dimension that is the i-th to be dealt with. */
static int dimension(int i, int ndims, int order) { return order == MPI_ORDER_C ? ndims - 1 - i : i; }

static int check_order(int order) {
    if (order == MPI_ORDER_C || order == MPI_ORDER_FORTRAN) return MPI_SUCCESS;
    return fail(MPI_ERR_ARG, "order is %d, expected MPI_ORDER_C or MPI_ORDER_FORTRAN", order);
}

static void add_counts(Recipe *recipe, int ndims, Counts values) {
    for (int i = 0; i < ndims; i++) add_count(recipe, count_at(values, i));
}

/* ---- A box ---- */

static int check_box(int ndims, Counts sizes, Counts subsizes, Counts starts) {
    if (ndims < 1) return fail(MPI_ERR_DIMS, "the array has %d dimensions, expected 1 or more", ndims);
    for (int i = 0; i < ndims; i++) {
        long long size = count_at(sizes, i), subsize = count_at(subsizes, i), start = count_at(starts, i);
        if (subsize < 1 || start < 0 || start > size - subsize)
            return fail(MPI_ERR_ARG, "dimension %d: %lld elements from %lld on of %lld", i, subsize, start, size);
    }
    return MPI_SUCCESS;
}

int do_Type_create_subarray(
    int ndims, Counts array_of_sizes, Counts array_of_subsizes, Counts array_of_starts, int order, Datatype *oldtype,
    Datatype **newtype, bool is_large) {
    TRY(check_box(ndims, array_of_sizes, array_of_subsizes, array_of_starts));
    TRY(check_order(order));
    Recipe *recipe = make_recipe(MPI_COMBINER_SUBARRAY);
    recipe->is_large = is_large;
    add_integer(recipe, ndims);
    add_counts(recipe, ndims, array_of_sizes);
    add_counts(recipe, ndims, array_of_subsizes);
    add_counts(recipe, ndims, array_of_starts);
    add_integer(recipe, order);
    add_type(recipe, oldtype);
    Chosen chosen = {keep_layout(oldtype->layout), oldtype->extent};
    for (int i = 0; i < ndims; i++) {
        int dim = dimension(i, ndims, order);
        PartList parts = {0};
        MPI_Aint start = (MPI_Aint)count_at(array_of_starts, dim) * chosen.stride;
        add_part(&parts, (Part){start, chosen.stride, count_at(array_of_subsizes, dim), chosen.layout});
        choose(&chosen, parts, count_at(array_of_sizes, dim));
    }
    *newtype = array_type(&chosen, oldtype, recipe);
    return MPI_SUCCESS;
}

/* ---- A share of a distributed array ---- */

/* One dimension: blocks of `block` indices are dealt to the processes in turn, and this one is at `place`. */
typedef struct {
    MPI_Count size, block;
    int num_places, place;
} Dealt;

static int deal(int dim, MPI_Count size, int distribution, int argument, Dealt *dealt) {
    if (size < 1) return fail(MPI_ERR_ARG, "dimension %d of the array has %lld elements", dim, (long long)size);
    bool is_default = argument == MPI_DISTRIBUTE_DFLT_DARG;
    dealt->size = size;
    if (!is_default && argument < 1 && distribution != MPI_DISTRIBUTE_NONE)
        return fail(MPI_ERR_ARG, "dimension %d: the distribution's argument is %d, expected 1 or more", dim, argument);
    if (distribution == MPI_DISTRIBUTE_NONE) {
        if (dealt->num_places != 1)
            return fail(MPI_ERR_ARG, "dimension %d is not distributed, but over %d processes", dim, dealt->num_places);
        dealt->block = size;
    } else if (distribution == MPI_DISTRIBUTE_CYCLIC) {
        dealt->block = is_default ? 1 : argument;
    } else if (distribution == MPI_DISTRIBUTE_BLOCK) {
        dealt->block = is_default ? (size + dealt->num_places - 1) / dealt->num_places : argument;
        if (dealt->block * dealt->num_places < size)
            return fail(MPI_ERR_ARG, "dimension %d: %d blocks of %d are less than %lld", dim, dealt->num_places,
                        argument, (long long)size);
    } else {
        return fail(MPI_ERR_ARG, "dimension %d: there is no distribution %d", dim, distribution);
    }
    return MPI_SUCCESS;
}

/* Whole blocks, and perhaps one that the array's end cuts off. */
static void choose_dealt(Chosen *chosen, const Dealt *dealt) {
    MPI_Count first = dealt->place * dealt->block, step = dealt->num_places * dealt->block;
    MPI_Count left = dealt->size - first;
    MPI_Count num_whole = left < dealt->block ? 0 : (left - dealt->block) / step + 1;
    MPI_Count tail = first + num_whole * step;
    PartList row = {0}, parts = {0};
    add_part(&row, (Part){0, chosen->stride, dealt->block, chosen->layout});
    Layout *block = layout_of_parts(row.num_parts, row.parts);
    add_part(&parts, (Part){first * chosen->stride, step * chosen->stride, num_whole, block});
    if (tail < dealt->size)
        add_part(&parts, (Part){tail * chosen->stride, chosen->stride, dealt->size - tail, chosen->layout});
    choose(chosen, parts, dealt->size);
    drop_layout(block);
}

/* The grid counts its last dimension fastest, whatever the order of the array. */
static int place_in_grid(int size, int rank, int ndims, const int psizes[], Dealt dealt[]) {
    int64_t product = 1;
    for (int i = 0; i < ndims; i++) {
        if (psizes[i] < 1) return fail(MPI_ERR_ARG, "dimension %d of the grid is %d, expected 1 or more", i, psizes[i]);
        product *= psizes[i];
    }
    if (product != size)
        return fail(MPI_ERR_ARG, "the grid has %lld places for %d processes", (long long)product, size);
    if (rank < 0 || rank >= size) return fail(MPI_ERR_ARG, "rank %d of %d processes", rank, size);
    for (int i = ndims - 1; i >= 0; i--) {
        dealt[i].num_places = psizes[i];
        dealt[i].place = rank % psizes[i];
        rank /= psizes[i];
    }
    return MPI_SUCCESS;
}

static void add_integers(Recipe *recipe, int count, const int values[]) {
    for (int i = 0; i < count; i++) add_integer(recipe, values[i]);
}

int do_Type_create_darray(
    int size, int rank, int ndims, Counts array_of_gsizes, const int array_of_distribs[], const int array_of_dargs[],
    const int array_of_psizes[], int order, Datatype *oldtype, Datatype **newtype, bool is_large) {
    if (ndims < 1) return fail(MPI_ERR_DIMS, "the array has %d dimensions, expected 1 or more", ndims);
    TRY(check_order(order));
    Dealt *dealt = NEW_ARRAY(Dealt, ndims);
    int error = place_in_grid(size, rank, ndims, array_of_psizes, dealt);
    for (int i = 0; i < ndims && !error; i++)
        error = deal(i, count_at(array_of_gsizes, i), array_of_distribs[i], array_of_dargs[i], &dealt[i]);
    if (!error) {
        Recipe *recipe = make_recipe(MPI_COMBINER_DARRAY);
        recipe->is_large = is_large;
        add_integers(recipe, 3, (int[]){size, rank, ndims});
        add_counts(recipe, ndims, array_of_gsizes);
        add_integers(recipe, ndims, array_of_distribs);
        add_integers(recipe, ndims, array_of_dargs);
        add_integers(recipe, ndims, array_of_psizes);
        add_integer(recipe, order);
        add_type(recipe, oldtype);
        Chosen chosen = {keep_layout(oldtype->layout), oldtype->extent};
        for (int i = 0; i < ndims; i++) choose_dealt(&chosen, &dealt[dimension(i, ndims, order)]);
        *newtype = array_type(&chosen, oldtype, recipe);
    }
    free(dealt);
    return error;
}
