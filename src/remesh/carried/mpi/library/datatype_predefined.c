/* The predefined datatypes of each face, and which of them Fortran means by a precision, a range or a size. */
#include "basic.h"
#include "layout.h"
#include "recipe.h"

typedef struct {
    MPI_Datatype handle;
    Basic basic;
    const char *name;
} Named;

#define ROW(NAME, basic) {NAME, basic, #NAME}

/* Of several names of one handle the first is what MPI_Type_get_name says. */
static Named *named_types(size_t *count) {
    /* In Open MPI's face handles are addresses that only the loader knows, so no static array can hold them. */
    Named all[] = {
        ROW(MPI_BYTE, BASIC_BYTE), ROW(MPI_PACKED, BASIC_BYTE),
        ROW(MPI_CHAR, BASIC_CHAR), ROW(MPI_WCHAR, BASIC_WCHAR),
        ROW(MPI_SIGNED_CHAR, BASIC_INT8), ROW(MPI_UNSIGNED_CHAR, BASIC_UINT8),
        ROW(MPI_SHORT, BASIC_INT16), ROW(MPI_UNSIGNED_SHORT, BASIC_UINT16),
        ROW(MPI_INT, BASIC_INT32), ROW(MPI_UNSIGNED, BASIC_UINT32),
        ROW(MPI_LONG, BASIC_INT64), ROW(MPI_UNSIGNED_LONG, BASIC_UINT64),
        ROW(MPI_LONG_LONG_INT, BASIC_INT64), ROW(MPI_LONG_LONG, BASIC_INT64),
        ROW(MPI_UNSIGNED_LONG_LONG, BASIC_UINT64),
        ROW(MPI_FLOAT, BASIC_FLOAT), ROW(MPI_DOUBLE, BASIC_DOUBLE), ROW(MPI_LONG_DOUBLE, BASIC_LONG_DOUBLE),
        ROW(MPI_C_BOOL, BASIC_BOOL),
        ROW(MPI_INT8_T, BASIC_INT8), ROW(MPI_INT16_T, BASIC_INT16),
        ROW(MPI_INT32_T, BASIC_INT32), ROW(MPI_INT64_T, BASIC_INT64),
        ROW(MPI_UINT8_T, BASIC_UINT8), ROW(MPI_UINT16_T, BASIC_UINT16),
        ROW(MPI_UINT32_T, BASIC_UINT32), ROW(MPI_UINT64_T, BASIC_UINT64),
        ROW(MPI_AINT, BASIC_INT64), ROW(MPI_COUNT, BASIC_INT64), ROW(MPI_OFFSET, BASIC_INT64),
        ROW(MPI_C_COMPLEX, BASIC_FLOAT_COMPLEX), ROW(MPI_C_FLOAT_COMPLEX, BASIC_FLOAT_COMPLEX),
        ROW(MPI_C_DOUBLE_COMPLEX, BASIC_DOUBLE_COMPLEX),
        ROW(MPI_C_LONG_DOUBLE_COMPLEX, BASIC_LONG_DOUBLE_COMPLEX),
        ROW(MPI_CXX_BOOL, BASIC_BOOL), ROW(MPI_CXX_FLOAT_COMPLEX, BASIC_FLOAT_COMPLEX),
        ROW(MPI_CXX_DOUBLE_COMPLEX, BASIC_DOUBLE_COMPLEX),
        ROW(MPI_CXX_LONG_DOUBLE_COMPLEX, BASIC_LONG_DOUBLE_COMPLEX),
        ROW(MPI_CHARACTER, BASIC_CHAR), ROW(MPI_LOGICAL, BASIC_LOGICAL4), ROW(MPI_INTEGER, BASIC_INT32),
        ROW(MPI_REAL, BASIC_FLOAT), ROW(MPI_DOUBLE_PRECISION, BASIC_DOUBLE),
        ROW(MPI_COMPLEX, BASIC_FLOAT_COMPLEX), ROW(MPI_DOUBLE_COMPLEX, BASIC_DOUBLE_COMPLEX),
        ROW(MPI_LOGICAL1, BASIC_LOGICAL1), ROW(MPI_LOGICAL2, BASIC_LOGICAL2),
        ROW(MPI_LOGICAL4, BASIC_LOGICAL4), ROW(MPI_LOGICAL8, BASIC_LOGICAL8),
        ROW(MPI_INTEGER1, BASIC_INT8), ROW(MPI_INTEGER2, BASIC_INT16),
        ROW(MPI_INTEGER4, BASIC_INT32), ROW(MPI_INTEGER8, BASIC_INT64),
        ROW(MPI_REAL4, BASIC_FLOAT), ROW(MPI_REAL8, BASIC_DOUBLE), ROW(MPI_REAL16, BASIC_FLOAT128),
        ROW(MPI_COMPLEX8, BASIC_FLOAT_COMPLEX), ROW(MPI_COMPLEX16, BASIC_DOUBLE_COMPLEX),
        ROW(MPI_COMPLEX32, BASIC_FLOAT128_COMPLEX),
        ROW(MPI_SHORT_INT, BASIC_SHORT_INT), ROW(MPI_2INT, BASIC_2INT), ROW(MPI_LONG_INT, BASIC_LONG_INT),
        ROW(MPI_FLOAT_INT, BASIC_FLOAT_INT), ROW(MPI_DOUBLE_INT, BASIC_DOUBLE_INT),
        ROW(MPI_LONG_DOUBLE_INT, BASIC_LONG_DOUBLE_INT),
        ROW(MPI_2INTEGER, BASIC_2INT), ROW(MPI_2REAL, BASIC_2REAL), ROW(MPI_2DOUBLE_PRECISION, BASIC_2DOUBLE),
#ifdef MPI_LOGICAL16
        ROW(MPI_LOGICAL16, BASIC_LOGICAL16),
#endif
#ifdef MPI_INTEGER16
        ROW(MPI_INTEGER16, BASIC_INT128),
#endif
#ifdef MPIX_C_FLOAT16
        ROW(MPIX_C_FLOAT16, BASIC_FLOAT16),
#endif
#ifdef MPIX_SHORT_FLOAT
        ROW(MPIX_SHORT_FLOAT, BASIC_FLOAT16), ROW(MPIX_C_SHORT_FLOAT_COMPLEX, BASIC_FLOAT16_COMPLEX),
#endif
#ifdef MPI_REAL2
        ROW(MPI_REAL2, BASIC_FLOAT16),
#endif
#ifdef MPI_COMPLEX4
        ROW(MPI_COMPLEX4, BASIC_FLOAT16_COMPLEX),
#endif
    };
    Named *copy = NEW_ARRAY(Named, sizeof all / sizeof *all);
    memcpy(copy, all, sizeof all);
    *count = sizeof all / sizeof *all;
    return copy;
}

/* A pair's index stands where C puts it; between the two there may be a gap, and behind the index as well. */
static Layout *pair_layout(const BasicRow *row) {
    MPI_Aint head = basic_of(row->value)->size, align = basic_of(row->index)->alignment;
    Part *parts = NEW_ARRAY(Part, 2);
    parts[0] = (Part){.count = 1, .layout = leaf_layout(row->value, 1)};
    parts[1] = (Part){.offset = (head + align - 1) / align * align, .count = 1, .layout = leaf_layout(row->index, 1)};
    Layout *leaves[] = {parts[0].layout, parts[1].layout};
    Layout *layout = layout_of_parts(2, parts);
    drop_layout(leaves[0]);
    drop_layout(leaves[1]);
    return layout;
}

static Datatype *predefine(MPI_Datatype handle, Basic basic, const char *name) {
    const BasicRow *row = basic_of(basic);
    Datatype *type = make_predefined(KIND_DATATYPE, sizeof(Datatype), BITS(handle));
    type->basic = basic;
    type->layout = row->kind == OF_PAIRS ? pair_layout(row) : leaf_layout(basic, 1);
    type->alignment = row->alignment;
    type->extent = (type->layout->end + row->alignment - 1) / row->alignment * row->alignment;
    type->is_committed = true;
    measure_type(type);
    snprintf(type->name, sizeof type->name, "%s", name);
    return type;
}

#ifdef MPI_LB
/* Marks of MPI 1 in structures: no data, but a bound. */
static void predefine_mark(MPI_Datatype handle, const char *name, bool is_lower) {
    Datatype *type = predefine(handle, BASIC_BYTE, name);
    drop_layout(type->layout);
    type->layout = leaf_layout(BASIC_BYTE, 0);
    type->extent = 0;
    type->has_lb = is_lower;
    type->has_ub = !is_lower;
    measure_type(type);
}
#endif

static void destroy_type(void *object) {
    Datatype *type = object;
    drop_layout(type->layout);
    drop_recipe(type->recipe);
}

void make_predefined_datatypes(void) {
    size_t count;
    Named *rows = named_types(&count);
    set_destructor(KIND_DATATYPE, destroy_type);
    for (size_t i = 0; i < count; i++) {
        if (rows[i].handle != MPI_DATATYPE_NULL && !datatype_of(rows[i].handle))
            predefine(rows[i].handle, rows[i].basic, rows[i].name);
    }
    free(rows);
#ifdef MPI_LB
    predefine_mark(MPI_LB, "MPI_LB", true);
    predefine_mark(MPI_UB, "MPI_UB", false);
#endif
}

/* ---- Fortran's parametrised types. Source: MPI 4.1, section 19.1.9 ---- */

/* The same handle for the same arguments, as long as the process lives. */
typedef struct F90Type {
    struct F90Type *next;
    int combiner, p, r;
    Datatype *type;
} F90Type;
static F90Type *f90_types;

static Datatype *parametrised(int combiner, int p, int r, MPI_Datatype base) {
    Datatype *type = NULL;
    LOCKED {
        F90Type *one = f90_types;
        while (one && (one->combiner != combiner || one->p != p || one->r != r)) one = one->next;
        if (!one) {
            one = NEW(F90Type);
            *one = (F90Type){f90_types, combiner, p, r, clone_type(datatype_of(base))};
            one->type->recipe = make_recipe(combiner);
            if (combiner != MPI_COMBINER_F90_INTEGER) add_integer(one->type->recipe, p);
            add_integer(one->type->recipe, r);
            one->type->object.is_predefined = true;
            f90_types = one;
        }
        type = one->type;
    }
    return type;
}

int do_Type_create_f90_integer(int r, Datatype **newtype) {
    if (r > 18) return fail(MPI_ERR_ARG, "no integer has a range of %d decimal digits, expected at most 18", r);
    MPI_Datatype base = r > 9 ? MPI_INTEGER8 : r > 4 ? MPI_INTEGER4 : r > 2 ? MPI_INTEGER2 : MPI_INTEGER1;
    *newtype = parametrised(MPI_COMBINER_F90_INTEGER, 0, r, base);
    return MPI_SUCCESS;
}

/* Bytes of the smallest real with so many decimal digits and such a range; 0: there is none. */
static int f90_real_size(int p, int r) {
    static const struct { int digits, range, size; } reals[] = {{6, 37, 4}, {15, 307, 8}, {33, 4931, 16}};
    for (int i = 0; i < 3; i++) {
        bool is_precise = p == MPI_UNDEFINED || p <= reals[i].digits;
        if (is_precise && (r == MPI_UNDEFINED || r <= reals[i].range)) return reals[i].size;
    }
    return 0;
}

static int no_f90_real(int p, int r) {
    if (p == MPI_UNDEFINED && r == MPI_UNDEFINED) return fail(MPI_ERR_ARG, "neither a precision nor a range is given");
    return fail(MPI_ERR_ARG, "no real has %d decimal digits and a range of %d, expected at most 33 and 4931", p, r);
}

int do_Type_create_f90_real(int p, int r, Datatype **newtype) {
    int size = p == MPI_UNDEFINED && r == MPI_UNDEFINED ? 0 : f90_real_size(p, r);
    if (!size) return no_f90_real(p, r);
    *newtype = parametrised(MPI_COMBINER_F90_REAL, p, r, size == 4 ? MPI_REAL4 : size == 8 ? MPI_REAL8 : MPI_REAL16);
    return MPI_SUCCESS;
}

int do_Type_create_f90_complex(int p, int r, Datatype **newtype) {
    int size = p == MPI_UNDEFINED && r == MPI_UNDEFINED ? 0 : f90_real_size(p, r);
    if (!size) return no_f90_real(p, r);
    MPI_Datatype base = size == 4 ? MPI_COMPLEX8 : size == 8 ? MPI_COMPLEX16 : MPI_COMPLEX32;
    *newtype = parametrised(MPI_COMBINER_F90_COMPLEX, p, r, base);
    return MPI_SUCCESS;
}

int do_Type_match_size(int typeclass, int size, Datatype **datatype) {
    MPI_Datatype found = MPI_DATATYPE_NULL;
    if (typeclass == MPI_TYPECLASS_INTEGER) {
        found = size == 1 ? MPI_INTEGER1 : size == 2 ? MPI_INTEGER2 : size == 4 ? MPI_INTEGER4
            : size == 8 ? MPI_INTEGER8 : MPI_DATATYPE_NULL;
#ifdef MPI_INTEGER16
        if (size == 16) found = MPI_INTEGER16;
#endif
    } else if (typeclass == MPI_TYPECLASS_REAL) {
        found = size == 4 ? MPI_REAL4 : size == 8 ? MPI_REAL8 : size == 16 ? MPI_REAL16 : MPI_DATATYPE_NULL;
    } else if (typeclass == MPI_TYPECLASS_COMPLEX) {
        found = size == 8 ? MPI_COMPLEX8 : size == 16 ? MPI_COMPLEX16 : size == 32 ? MPI_COMPLEX32 : MPI_DATATYPE_NULL;
    } else {
        return fail(MPI_ERR_ARG, "typeclass is %d, expected MPI_TYPECLASS_INTEGER, _REAL or _COMPLEX", typeclass);
    }
    if (found == MPI_DATATYPE_NULL) return fail(MPI_ERR_ARG, "Fortran has no such type of %d bytes", size);
    *datatype = datatype_of(found);
    return MPI_SUCCESS;
}

int do_Type_get_value_index(Datatype *value_type, Datatype *index_type, Datatype **pair_type) {
    const MPI_Datatype singles[] = {MPI_SHORT, MPI_INT, MPI_LONG, MPI_FLOAT, MPI_DOUBLE, MPI_LONG_DOUBLE};
    const MPI_Datatype pairs[] = {
        MPI_SHORT_INT, MPI_2INT, MPI_LONG_INT, MPI_FLOAT_INT, MPI_DOUBLE_INT, MPI_LONG_DOUBLE_INT};
    *pair_type = NULL;
    if (index_type != datatype_of(MPI_INT)) return MPI_SUCCESS;
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        if (value_type == datatype_of(singles[i])) *pair_type = datatype_of(pairs[i]);
    }
    return MPI_SUCCESS;
}
