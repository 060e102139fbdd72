/* The constructors of datatypes: contiguous, vectors, blocks at displacements, structures, and other bounds.
 *
 * Where bounds of a part were set by the program (resized, or a mark of MPI 1), only such parts count for that bound of
 * the whole; the extent of a structure is padded as C does it, unless its upper bound was set. Source: MPI 4.1,
 * section 5.1.
 */
#include "layout.h"
#include "recipe.h"

/* ---- Bounds ---- */

typedef struct {
    MPI_Aint lb, ub;
    bool has_lb, has_ub, is_empty;
    int alignment;
} Bounds;
static const Bounds no_bounds = {.is_empty = true, .alignment = 1};

/* Takes in `count` elements from a displacement on, one extent apart. What has neither data nor bounds that were set is
 * nothing, wherever it stands.
 */
static void widen(Bounds *bounds, MPI_Aint displacement, MPI_Count count, const Datatype *type) {
    if (count <= 0 || (type->size == 0 && !type->has_lb && !type->has_ub)) return;
    MPI_Aint reach = (count - 1) * type->extent;
    MPI_Aint lb = displacement + type->lb + (reach < 0 ? reach : 0);
    MPI_Aint ub = displacement + type->lb + type->extent + (reach > 0 ? reach : 0);
    bool is_first_lb = bounds->is_empty || (type->has_lb && !bounds->has_lb);
    bool is_first_ub = bounds->is_empty || (type->has_ub && !bounds->has_ub);
    if (is_first_lb || (type->has_lb == bounds->has_lb && lb < bounds->lb)) bounds->lb = lb;
    if (is_first_ub || (type->has_ub == bounds->has_ub && ub > bounds->ub)) bounds->ub = ub;
    bounds->has_lb |= type->has_lb;
    bounds->has_ub |= type->has_ub;
    bounds->is_empty = false;
    if (type->alignment > bounds->alignment) bounds->alignment = type->alignment;
}

/* ---- What all constructors do ---- */

static Recipe *recipe_from(int combiner, Datatype *oldtype, bool is_large) {
    Recipe *recipe = make_recipe(combiner);
    recipe->is_large = is_large;
    if (oldtype) add_type(recipe, oldtype);
    return recipe;
}

/* Takes the parts, which keep their layouts from then on, and the recipe. */
static Datatype *new_type(PartList parts, const Bounds *bounds, Basic basic, Recipe *recipe) {
    Datatype *type = make_object(KIND_DATATYPE, sizeof(Datatype));
    type->layout = layout_of_parts(parts.num_parts, parts.parts);
    type->recipe = recipe;
    type->basic = basic;
    type->lb = bounds->lb;
    type->extent = bounds->ub - bounds->lb;
    type->has_lb = bounds->has_lb;
    type->has_ub = bounds->has_ub;
    type->alignment = (uint8_t)bounds->alignment;
    measure_type(type);
    return type;
}

static Layout *copies(Layout *layout, MPI_Count count, MPI_Aint stride) {
    PartList list = {0};
    add_part(&list, (Part){.stride = stride, .count = count, .layout = layout});
    return layout_of_parts(list.num_parts, list.parts);
}

static Datatype *strided(Datatype *old, MPI_Count count, MPI_Count length, MPI_Aint stride, Recipe *recipe) {
    Bounds bounds = no_bounds;
    if (count > 0) {
        widen(&bounds, 0, length, old);
        widen(&bounds, (count - 1) * stride, length, old);
    }
    Layout *block = copies(old->layout, length, old->extent);
    PartList parts = {0};
    add_part(&parts, (Part){.stride = stride, .count = count, .layout = block});
    Datatype *type = new_type(parts, &bounds, old->basic, recipe);
    drop_layout(block);
    return type;
}

int do_Type_contiguous(MPI_Count count, Datatype *oldtype, Datatype **newtype, bool is_large) {
    Recipe *recipe = recipe_from(MPI_COMBINER_CONTIGUOUS, oldtype, is_large);
    add_count(recipe, count);
    *newtype = strided(oldtype, count, 1, oldtype->extent, recipe);
    return MPI_SUCCESS;
}

int do_Type_vector(
    MPI_Count count, MPI_Count blocklength, MPI_Count stride, Datatype *oldtype, Datatype **newtype, bool is_large) {
    Recipe *recipe = recipe_from(MPI_COMBINER_VECTOR, oldtype, is_large);
    add_count(recipe, count);
    add_count(recipe, blocklength);
    add_count(recipe, stride);
    *newtype = strided(oldtype, count, blocklength, stride * oldtype->extent, recipe);
    return MPI_SUCCESS;
}

int do_Type_create_hvector(
    MPI_Count count, MPI_Count blocklength, MPI_Count stride, Datatype *oldtype, Datatype **newtype, bool is_large) {
    Recipe *recipe = recipe_from(MPI_COMBINER_HVECTOR, oldtype, is_large);
    add_count(recipe, count);
    add_count(recipe, blocklength);
    add_displacement(recipe, stride);
    *newtype = strided(oldtype, count, blocklength, stride, recipe);
    return MPI_SUCCESS;
}

int do_Type_hvector(int count, int blocklength, MPI_Aint stride, Datatype *oldtype, Datatype **newtype) {
    return do_Type_create_hvector(count, blocklength, stride, oldtype, newtype, false);
}

/* ---- Blocks at displacements ---- */

/* Blocks of one datatype; `lengths.values` is NULL where all are `length` long. */
typedef struct {
    MPI_Count count, length;
    Counts lengths, displacements;
    MPI_Aint unit; /* bytes that displacements count in */
} Blocks;

static MPI_Count length_at(const Blocks *blocks, MPI_Count i) {
    return blocks->lengths.values ? count_at(blocks->lengths, i) : blocks->length;
}

static int check_blocks(MPI_Count count, Counts lengths) {
    for (MPI_Count i = 0; i < count; i++) {
        MPI_Count length = count_at(lengths, i);
        if (length < 0)
            return fail(MPI_ERR_ARG, "block %lld has %lld elements", (long long)i, (long long)length);
    }
    return MPI_SUCCESS;
}

/* Blocks that are all equally long are copies of one layout, and regular rows of them become one part. */
static bool are_alike(const Blocks *blocks) {
    for (MPI_Count i = 1; i < blocks->count; i++) {
        if (length_at(blocks, i) != length_at(blocks, 0)) return false;
    }
    return blocks->count > 0;
}

static Datatype *placed(const Blocks *blocks, Datatype *old, Recipe *recipe) {
    Bounds bounds = no_bounds;
    PartList parts = {0};
    Layout *block = are_alike(blocks) ? copies(old->layout, length_at(blocks, 0), old->extent) : NULL;
    for (MPI_Count i = 0; i < blocks->count; i++) {
        MPI_Aint displacement = (MPI_Aint)count_at(blocks->displacements, i) * blocks->unit;
        MPI_Count length = length_at(blocks, i);
        widen(&bounds, displacement, length, old);
        if (block) add_part(&parts, (Part){.offset = displacement, .count = 1, .layout = block});
        else add_part(&parts, (Part){displacement, old->extent, length, old->layout});
    }
    Datatype *type = new_type(parts, &bounds, old->basic, recipe);
    if (block) drop_layout(block);
    return type;
}

static void add_counts(Recipe *recipe, MPI_Count count, Counts values) {
    for (MPI_Count i = 0; i < count; i++) add_count(recipe, count_at(values, i));
}

static void add_displacements(Recipe *recipe, MPI_Count count, Counts values) {
    for (MPI_Count i = 0; i < count; i++) add_displacement(recipe, count_at(values, i));
}

int do_Type_indexed(
    MPI_Count count, Counts array_of_blocklengths, Counts array_of_displacements, Datatype *oldtype,
    Datatype **newtype, bool is_large) {
    TRY(check_blocks(count, array_of_blocklengths));
    Recipe *recipe = recipe_from(MPI_COMBINER_INDEXED, oldtype, is_large);
    add_count(recipe, count);
    add_counts(recipe, count, array_of_blocklengths);
    add_counts(recipe, count, array_of_displacements);
    Blocks blocks = {count, 0, array_of_blocklengths, array_of_displacements, oldtype->extent};
    *newtype = placed(&blocks, oldtype, recipe);
    return MPI_SUCCESS;
}

int do_Type_create_hindexed(
    MPI_Count count, Counts array_of_blocklengths, Counts array_of_displacements, Datatype *oldtype,
    Datatype **newtype, bool is_large) {
    TRY(check_blocks(count, array_of_blocklengths));
    Recipe *recipe = recipe_from(MPI_COMBINER_HINDEXED, oldtype, is_large);
    add_count(recipe, count);
    add_counts(recipe, count, array_of_blocklengths);
    add_displacements(recipe, count, array_of_displacements);
    Blocks blocks = {count, 0, array_of_blocklengths, array_of_displacements, 1};
    *newtype = placed(&blocks, oldtype, recipe);
    return MPI_SUCCESS;
}

int do_Type_hindexed(
    int count, int array_of_blocklengths[], MPI_Aint array_of_displacements[], Datatype *oldtype, Datatype **newtype) {
    Counts lengths = {array_of_blocklengths, sizeof(int)}, displacements = {array_of_displacements, sizeof(MPI_Aint)};
    return do_Type_create_hindexed(count, lengths, displacements, oldtype, newtype, false);
}

int do_Type_create_indexed_block(
    MPI_Count count, MPI_Count blocklength, Counts array_of_displacements, Datatype *oldtype, Datatype **newtype,
    bool is_large) {
    Recipe *recipe = recipe_from(MPI_COMBINER_INDEXED_BLOCK, oldtype, is_large);
    add_count(recipe, count);
    add_count(recipe, blocklength);
    add_counts(recipe, count, array_of_displacements);
    Blocks blocks = {count, blocklength, {NULL, 0}, array_of_displacements, oldtype->extent};
    *newtype = placed(&blocks, oldtype, recipe);
    return MPI_SUCCESS;
}

int do_Type_create_hindexed_block(
    MPI_Count count, MPI_Count blocklength, Counts array_of_displacements, Datatype *oldtype, Datatype **newtype,
    bool is_large) {
    Recipe *recipe = recipe_from(MPI_COMBINER_HINDEXED_BLOCK, oldtype, is_large);
    add_count(recipe, count);
    add_count(recipe, blocklength);
    add_displacements(recipe, count, array_of_displacements);
    Blocks blocks = {count, blocklength, {NULL, 0}, array_of_displacements, 1};
    *newtype = placed(&blocks, oldtype, recipe);
    return MPI_SUCCESS;
}

/* ---- Structures ---- */

static int check_types(MPI_Count count, const MPI_Datatype types[]) {
    for (MPI_Count i = 0; i < count; i++) {
        if (!datatype_of(types[i])) return fail(MPI_ERR_TYPE, "datatype %lld of the structure is none", (long long)i);
    }
    return MPI_SUCCESS;
}

/* C's padding at the end; a bound that was set stays. */
static void pad(Bounds *bounds) {
    MPI_Aint over = (bounds->ub - bounds->lb) % bounds->alignment;
    if (!bounds->has_ub && over > 0) bounds->ub += bounds->alignment - over;
}

int do_Type_create_struct(
    MPI_Count count, Counts array_of_blocklengths, Counts array_of_displacements,
    const MPI_Datatype array_of_types[], Datatype **newtype, bool is_large) {
    TRY(check_blocks(count, array_of_blocklengths));
    TRY(check_types(count, array_of_types));
    Recipe *recipe = recipe_from(MPI_COMBINER_STRUCT, NULL, is_large);
    add_count(recipe, count);
    add_counts(recipe, count, array_of_blocklengths);
    add_displacements(recipe, count, array_of_displacements);
    Bounds bounds = no_bounds;
    PartList parts = {0};
    Basic basic = BASIC_NONE;
    bool has_data = false;
    for (MPI_Count i = 0; i < count; i++) {
        Datatype *type = datatype_of(array_of_types[i]);
        MPI_Aint displacement = (MPI_Aint)count_at(array_of_displacements, i);
        MPI_Count length = count_at(array_of_blocklengths, i);
        add_type(recipe, type);
        widen(&bounds, displacement, length, type);
        add_part(&parts, (Part){displacement, type->extent, length, type->layout});
        if (length == 0 || type->size == 0) continue;
        basic = !has_data || basic == type->basic ? type->basic : BASIC_NONE;
        has_data = true;
    }
    pad(&bounds);
    *newtype = new_type(parts, &bounds, basic, recipe);
    return MPI_SUCCESS;
}

int do_Type_struct(
    int count, int array_of_blocklengths[], MPI_Aint array_of_displacements[], MPI_Datatype array_of_types[],
    Datatype **newtype) {
    Counts lengths = {array_of_blocklengths, sizeof(int)}, displacements = {array_of_displacements, sizeof(MPI_Aint)};
    return do_Type_create_struct(count, lengths, displacements, array_of_types, newtype, false);
}

/* ---- Other bounds ---- */

int do_Type_create_resized(Datatype *oldtype, MPI_Count lb, MPI_Count extent, Datatype **newtype, bool is_large) {
    Datatype *type = clone_type(oldtype);
    drop_recipe(type->recipe);
    type->recipe = recipe_from(MPI_COMBINER_RESIZED, oldtype, is_large);
    add_displacement(type->recipe, lb);
    add_displacement(type->recipe, extent);
    type->lb = (MPI_Aint)lb;
    type->extent = (MPI_Aint)extent;
    type->has_lb = type->has_ub = true;
    type->is_committed = false;
    measure_type(type);
    *newtype = type;
    return MPI_SUCCESS;
}
