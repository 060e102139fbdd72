/* How a program has made a datatype, and the questions that it may ask about it. */
#include "recipe.h"

#include "layout.h"

/* ---- Writing it down ---- */

Recipe *make_recipe(int combiner) {
    Recipe *recipe = NEW(Recipe);
    recipe->references = 1;
    recipe->combiner = combiner;
    return recipe;
}

#define APPEND(recipe, what, value)                                                                               \
    do {                                                                                                          \
        if ((recipe)->num_##what == (recipe)->room_##what) {                                                      \
            (recipe)->room_##what = (recipe)->room_##what ? 2 * (recipe)->room_##what : 4;                        \
            size_t bytes_ = (size_t)(recipe)->room_##what * sizeof *(recipe)->what;                               \
            (recipe)->what = must_have(realloc((recipe)->what, bytes_));                                          \
        }                                                                                                         \
        (recipe)->what[(recipe)->num_##what++] = (value);                                                         \
    } while (0)

void add_integer(Recipe *recipe, int value) { APPEND(recipe, integers, value); }

void add_count(Recipe *recipe, MPI_Count value) {
    if (recipe->is_large) APPEND(recipe, counts, value);
    else APPEND(recipe, integers, (int)value);
}

void add_displacement(Recipe *recipe, MPI_Count value) {
    if (recipe->is_large) APPEND(recipe, counts, value);
    else APPEND(recipe, addresses, (MPI_Aint)value);
}

void add_type(Recipe *recipe, Datatype *type) {
    keep(type);
    APPEND(recipe, types, type);
}

void drop_recipe(Recipe *recipe) {
    if (!recipe || --recipe->references) return;
    for (MPI_Count i = 0; i < recipe->num_types; i++) let_go(recipe->types[i]);
    free(recipe->integers);
    free(recipe->addresses);
    free(recipe->counts);
    free(recipe->types);
    free(recipe);
}

/* ---- Asking ---- */

static int combiner_of(const Datatype *type) { return type->recipe ? type->recipe->combiner : MPI_COMBINER_NAMED; }

static int check_small(const Datatype *type) {
    if (!type->recipe || !type->recipe->is_large) return MPI_SUCCESS;
    return fail(MPI_ERR_TYPE, "the datatype was made with large counts: ask by the form with _c");
}

int do_Type_get_envelope(
    Datatype *datatype, int *num_integers, int *num_addresses, int *num_datatypes, int *combiner) {
    static const Recipe none;
    const Recipe *recipe = datatype->recipe ? datatype->recipe : &none;
    TRY(check_small(datatype));
    *num_integers = (int)recipe->num_integers;
    *num_addresses = (int)recipe->num_addresses;
    *num_datatypes = (int)recipe->num_types;
    *combiner = combiner_of(datatype);
    return MPI_SUCCESS;
}

int do_Type_get_envelope_c(
    Datatype *datatype, MPI_Count *num_integers, MPI_Count *num_addresses, MPI_Count *num_large_counts,
    MPI_Count *num_datatypes, int *combiner) {
    static const Recipe none;
    const Recipe *recipe = datatype->recipe ? datatype->recipe : &none;
    *num_integers = recipe->num_integers;
    *num_addresses = recipe->num_addresses;
    *num_large_counts = recipe->num_counts;
    *num_datatypes = recipe->num_types;
    *combiner = combiner_of(datatype);
    return MPI_SUCCESS;
}

static int check_room(MPI_Count room, MPI_Count num, const char *what) {
    if (room >= num) return MPI_SUCCESS;
    return fail(MPI_ERR_ARG, "there is room for %lld %s, the datatype has %lld", (long long)room, what, (long long)num);
}

/* Derived datatypes are new handles, which the program is to free; those of predefined ones are the same as ever. */
static void tell_types(const Recipe *recipe, MPI_Datatype array_of_datatypes[]) {
    for (MPI_Count i = 0; i < recipe->num_types; i++) {
        const Datatype *type = recipe->types[i];
        array_of_datatypes[i] = datatype_handle(type->object.is_predefined ? type : clone_type(type));
    }
}

#define TELL(recipe, what, array) \
    if ((recipe)->num_##what) memcpy(array, (recipe)->what, (size_t)(recipe)->num_##what * sizeof *(recipe)->what)

int do_Type_get_contents(
    Datatype *datatype, int max_integers, int max_addresses, int max_datatypes, int array_of_integers[],
    MPI_Aint array_of_addresses[], MPI_Datatype array_of_datatypes[]) {
    TRY(check_small(datatype));
    return do_Type_get_contents_c(
        datatype, max_integers, max_addresses, 0, max_datatypes, array_of_integers, array_of_addresses, NULL,
        array_of_datatypes);
}

int do_Type_get_contents_c(
    Datatype *datatype, MPI_Count max_integers, MPI_Count max_addresses, MPI_Count max_large_counts,
    MPI_Count max_datatypes, int array_of_integers[], MPI_Aint array_of_addresses[],
    MPI_Count array_of_large_counts[], MPI_Datatype array_of_datatypes[]) {
    const Recipe *recipe = datatype->recipe;
    if (!recipe) return fail(MPI_ERR_TYPE, "%s is predefined and has no contents", datatype->name);
    TRY(check_room(max_integers, recipe->num_integers, "integers"));
    TRY(check_room(max_addresses, recipe->num_addresses, "addresses"));
    TRY(check_room(max_large_counts, recipe->num_counts, "large counts"));
    TRY(check_room(max_datatypes, recipe->num_types, "datatypes"));
    TELL(recipe, integers, array_of_integers);
    TELL(recipe, addresses, array_of_addresses);
    TELL(recipe, counts, array_of_large_counts);
    tell_types(recipe, array_of_datatypes);
    return MPI_SUCCESS;
}
