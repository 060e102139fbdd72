/* Handles: how a program names an object in each face, and the object behind it.
 *
 * Where handles are pointers they are addresses of objects, which begin with a mark and their own address. Open MPI's
 * predefined handles are addresses of exported data, which get the same mark and the address of the object. The standard
 * ABI's are small numbers, MPICH's all are integers: an index into a table, with the kind above it.
 */
#include "core.h"

static void (*destructors[NUM_KINDS])(void *);

void set_destructor(ObjectKind kind, void (*destroy)(void *)) { destructors[kind] = destroy; }

/* ---- tables of numbered objects: MPICH's handles, and Fortran's numbers in other faces ---- */

/* Chunks stay where they are, so readers need no lock. */
enum { CHUNK = 1 << 12, NUM_CHUNKS = 1 << 12 };
typedef _Atomic(Object *) Place;
typedef struct {
    _Atomic(Place *) chunks[NUM_CHUNKS];
    uint32_t num_used;
    uint32_t *free; /* numbers that were given back */
    uint32_t num_free, room;
} Table;

static Object *table_get(Table *table, uint32_t number) {
    if (number >= (uint32_t)CHUNK * NUM_CHUNKS) return NULL;
    Place *chunk = atomic_load_explicit(&table->chunks[number / CHUNK], memory_order_acquire);
    return chunk ? atomic_load_explicit(&chunk[number % CHUNK], memory_order_acquire) : NULL;
}

static void table_put(Table *table, uint32_t number, Object *object) {
    _Atomic(Place *) *chunk = &table->chunks[number / CHUNK];
    if (!atomic_load(chunk)) atomic_store(chunk, NEW_ARRAY(Place, CHUNK));
    atomic_store_explicit(&atomic_load(chunk)[number % CHUNK], object, memory_order_release);
}

/* A number that nobody has. */
static uint32_t table_add(Table *table, Object *object) {
    uint32_t number = 0;
    LOCKED {
        number = table->num_free ? table->free[--table->num_free] : table->num_used++;
        if (number >= (uint32_t)CHUNK * NUM_CHUNKS) die("more than %d objects of one kind", CHUNK * NUM_CHUNKS);
        table_put(table, number, object);
    }
    return number;
}

static void table_remove(Table *table, uint32_t number) {
    LOCKED {
        table_put(table, number, NULL);
        if (table->num_free == table->room) {
            table->room = table->room ? 2 * table->room : 64;
            table->free = must_have(realloc(table->free, table->room * sizeof *table->free));
        }
        table->free[table->num_free++] = number;
    }
}

/* ---- handles ---- */

#if defined(FACE_MPICH)

/* Bits 30 and 31 of a handle are 1 of predefined ones, 3 of ours, and bits 26 to 29 are the kind. Some predefined
 * datatypes have 2 on top; below the kind both count from 0 in the lowest byte.
 */
enum { KIND_SHIFT = 26, OURS = 3, INDEX_MASK = (1 << KIND_SHIFT) - 1 };
static const uint32_t kinds[NUM_KINDS] = {
    [KIND_COMM] = 1, [KIND_GROUP] = 2, [KIND_DATATYPE] = 3, [KIND_ERRHANDLER] = 5, [KIND_OP] = 6, [KIND_INFO] = 7,
    [KIND_WIN] = 8, [KIND_REQUEST] = 11, [KIND_MESSAGE] = 11, [KIND_SESSION] = 14};
static Table tables[NUM_KINDS];
static Object *predefined[NUM_KINDS][2][256];

static bool is_number(ObjectKind kind) { return kind != KIND_FILE; }

static void give_handle(Object *object) {
    uint32_t index = table_add(&tables[object->kind], object);
    object->handle = (uintptr_t)(intptr_t)(int)((uint32_t)OURS << 30 | kinds[object->kind] << KIND_SHIFT | index);
}
static void take_handle(Object *object) { table_remove(&tables[object->kind], (uint32_t)object->handle & INDEX_MASK); }

static Object *find_numbered(ObjectKind kind, uintptr_t handle) {
    uint32_t bits = (uint32_t)handle, top = bits >> 30;
    if ((bits >> KIND_SHIFT & 15) != kinds[kind]) return NULL;
    if (top == OURS) return table_get(&tables[kind], bits & INDEX_MASK);
    return top ? predefined[kind][top - 1][bits & 255] : NULL;
}

static void note_predefined(Object *object, uintptr_t handle) {
    uint32_t bits = (uint32_t)handle;
    predefined[object->kind][(bits >> 30) - 1][bits & 255] = object;
}

#else

static bool is_number(ObjectKind kind) { return (void)kind, false; }
static void give_handle(Object *object) { (void)object; }
static void take_handle(Object *object) { (void)object; }

#if defined(FACE_ABI)

enum { NUM_PREDEFINED = 4096 };
static Object *predefined[NUM_PREDEFINED];

static Object *find_numbered(ObjectKind kind, uintptr_t handle) {
    Object *object = handle < NUM_PREDEFINED ? predefined[handle] : NULL;
    return object && object->kind == kind ? object : NULL;
}
static void note_predefined(Object *object, uintptr_t handle) { predefined[handle] = object; }

#else

static Object *find_numbered(ObjectKind kind, uintptr_t handle) { return (void)kind, (void)handle, NULL; }

/* The program may hold a copy of the data that it was linked with: its address is what the symbol means everywhere. */
static void note_predefined(Object *object, uintptr_t handle) {
    Object *seen = (Object *)handle;
    seen->magic = OBJECT_MAGIC;
    seen->object = object;
}

#endif
#endif

/* Below this no object stands: small numbers are predefined handles, or none. */
enum { LOWEST_ADDRESS = 65536 };

void *object_of(ObjectKind kind, uintptr_t handle) {
    if (is_number(kind)) return find_numbered(kind, handle);
    if (handle < LOWEST_ADDRESS) return find_numbered(kind, handle);
    const Object *seen = (const Object *)handle;
    if (seen->magic != OBJECT_MAGIC) return NULL;
    Object *object = seen->object;
    return object && object->kind == kind && !object->is_freed ? object : NULL;
}

static Object *prepare(Object *object, ObjectKind kind) {
    object->magic = OBJECT_MAGIC;
    object->object = object;
    object->handle = (uintptr_t)object;
    object->kind = (uint8_t)kind;
    atomic_init(&object->references, 1);
    return object;
}

void *make_object(ObjectKind kind, size_t size) {
    Object *object = prepare(must_have(calloc(1, size)), kind);
    if (is_number(kind)) give_handle(object);
    return object;
}

void *make_predefined(ObjectKind kind, size_t size, uintptr_t handle) {
    Object *object = prepare(must_have(calloc(1, size)), kind);
    object->is_predefined = true;
    object->handle = handle;
    note_predefined(object, handle);
    return object;
}

void add_predefined_handle(void *object, uintptr_t handle) { note_predefined(object, handle); }

void keep(void *object) {
    if (object) atomic_fetch_add_explicit(&((Object *)object)->references, 1, memory_order_relaxed);
}

/* ---- Fortran's numbers, where handles are no integers ---- */

/* From here on; below stand the numbers of predefined handles, which fortran.c notes. */
enum { FIRST_NUMBER = 4096 };
static Table numbered[NUM_KINDS];

MPI_Fint fortran_of(ObjectKind kind, uintptr_t handle) {
    if (is_number(kind)) return (MPI_Fint)handle;
    Object *object = object_of(kind, handle);
#if defined(FACE_OPENMPI)
    MPI_Fint number = 0;
    if ((!object || object->is_predefined) && number_of_predefined(kind, handle, &number)) return number;
#endif
    if (object == NULL) return handle < LOWEST_ADDRESS ? (MPI_Fint)handle : 0;
    LOCKED if (!object->fortran) {
        if (object->is_predefined && handle < LOWEST_ADDRESS) object->fortran = (int)handle;
        else object->fortran = FIRST_NUMBER + (int)table_add(&numbered[kind], object);
    }
    return object->fortran;
}

uintptr_t handle_of_fortran(ObjectKind kind, MPI_Fint number) {
#if defined(FACE_OPENMPI)
    if (number < FIRST_NUMBER) return predefined_of_number(kind, number);
#endif
    if (is_number(kind) || (number >= 0 && number < FIRST_NUMBER)) return (uintptr_t)(intptr_t)number;
    const Object *object = table_get(&numbered[kind], (uint32_t)(number - FIRST_NUMBER));
    return object ? object->handle : 0;
}

/* ---- ends ---- */

void free_handle(void *given) {
    Object *object = given;
    if (object->is_predefined || object->is_freed) return;
    object->is_freed = true;
    if (is_number(object->kind)) take_handle(object);
    if (object->fortran >= FIRST_NUMBER) table_remove(&numbered[object->kind], (uint32_t)(object->fortran - FIRST_NUMBER));
    let_go(object);
}

void let_go(void *given) {
    Object *object = given;
    if (object == NULL || object->is_predefined) return;
    if (atomic_fetch_sub_explicit(&object->references, 1, memory_order_acq_rel) != 1) return;
    if (destructors[object->kind]) destructors[object->kind](object);
    if (!object->is_freed) {
        /* It was never the program's, or went without its handle being freed. */
        if (is_number(object->kind)) take_handle(object);
        if (object->fortran >= FIRST_NUMBER)
            table_remove(&numbered[object->kind], (uint32_t)(object->fortran - FIRST_NUMBER));
    }
    let_go(object->errhandler);
    object->magic = 0;
    free(object);
}
