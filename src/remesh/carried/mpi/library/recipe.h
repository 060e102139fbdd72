/* How a program has made a datatype: what MPI_Type_get_envelope and MPI_Type_get_contents tell. */
#ifndef REMESH_RECIPE_H
#define REMESH_RECIPE_H

#include "datatype.h"

typedef struct Recipe Recipe;
struct Recipe {
    _Atomic int references;
    int combiner;
    bool is_large;          /* made by a form of large counts: these stand in `counts` */
    MPI_Count num_integers, num_addresses, num_counts, num_types;
    MPI_Count room_integers, room_addresses, room_counts, room_types;
    int *integers;
    MPI_Aint *addresses;
    MPI_Count *counts;
    Datatype **types;       /* kept: they live on when the program has freed them */
};

INTERNAL Recipe *make_recipe(int combiner);
/* Each goes to the end of its kind; a count or a displacement to the large counts, if the recipe is large. */
INTERNAL void add_integer(Recipe *recipe, int value);
INTERNAL void add_count(Recipe *recipe, MPI_Count value);
INTERNAL void add_displacement(Recipe *recipe, MPI_Count value);
INTERNAL void add_type(Recipe *recipe, Datatype *type);
INTERNAL void drop_recipe(Recipe *recipe);

/* Sets what follows from a datatype's layout and extent. */
INTERNAL void measure_type(Datatype *type);
/* Another object that is the same type, without attributes and name. */
INTERNAL Datatype *clone_type(const Datatype *type);

#endif
