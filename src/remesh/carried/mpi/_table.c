/* Objects by number, for C without an exception and for Python as the four methods of a mutable mapping. */
#include "_table.h"
#include <stdlib.h>

enum { LEAST_ROOM = 16 };

static PyTypeObject *table_type;

int is_table(PyObject *object) { return PyObject_TypeCheck(object, table_type); }

static size_t own_place(uint64_t number, size_t room) { return (size_t)(number * 0x9e3779b97f4a7c15u >> 32) & (room - 1); }

/* Where the number stands, or the free place where it would. There is room. */
static TableEntry *place_of(const Table *table, uint64_t number) {
    size_t at = own_place(number, table->room);
    while (table->entries[at].value != NULL && table->entries[at].number != number) at = (at + 1) & (table->room - 1);
    return &table->entries[at];
}

PyObject *table_find(const Table *table, uint64_t number) { return table->room ? place_of(table, number)->value : NULL; }

static int make_room(Table *table) {
    if (table->count * 4 < table->room * 3) return 0;
    Table larger = {.room = table->room ? 2 * table->room : LEAST_ROOM};
    larger.entries = calloc(larger.room, sizeof *larger.entries);
    if (larger.entries == NULL) return PyErr_NoMemory(), -1;
    for (size_t i = 0; i < table->room; i++)
        if (table->entries[i].value != NULL) *place_of(&larger, table->entries[i].number) = table->entries[i];
    free(table->entries);
    table->entries = larger.entries;
    table->room = larger.room;
    return 0;
}

int table_set(Table *table, uint64_t number, PyObject *value) {
    if (make_room(table)) return -1;
    TableEntry *entry = place_of(table, number);
    PyObject *before = entry->value;
    Py_INCREF(value);
    *entry = (TableEntry){number, value};
    if (before == NULL) table->count++;
    Py_XDECREF(before);
    return 0;
}

/* Those behind a gap that belong before it move up. */
static void close_gap(Table *table, size_t gap) {
    size_t mask = table->room - 1;
    for (size_t at = (gap + 1) & mask; table->entries[at].value != NULL; at = (at + 1) & mask) {
        size_t own = own_place(table->entries[at].number, table->room);
        if (((at - own) & mask) < ((at - gap) & mask)) continue;
        table->entries[gap] = table->entries[at];
        gap = at;
    }
    table->entries[gap].value = NULL;
}

int table_remove(Table *table, uint64_t number) {
    TableEntry *entry = table->room ? place_of(table, number) : NULL;
    PyObject *value = entry == NULL ? NULL : entry->value;
    if (value == NULL) return 0;
    close_gap(table, (size_t)(entry - table->entries));
    table->count--;
    Py_DECREF(value);
    return 1;
}

PyObject *table_next(const Table *table, size_t *at) {
    while (*at < table->room) {
        PyObject *value = table->entries[(*at)++].value;
        if (value != NULL) return value;
    }
    return NULL;
}

/* ---- for Python ---- */

/* -1 with an exception, which a number may be as well. */
static uint64_t number_of(PyObject *key) { return PyLong_AsUnsignedLongLong(key); }

static PyObject *table_subscript(PyObject *self, PyObject *key) {
    uint64_t number = number_of(key);
    if (PyErr_Occurred()) return NULL;
    PyObject *value = table_find((Table *)self, number);
    if (value == NULL) PyErr_SetObject(PyExc_KeyError, key);
    Py_XINCREF(value);
    return value;
}

static int table_assign(PyObject *self, PyObject *key, PyObject *value) {
    uint64_t number = number_of(key);
    if (PyErr_Occurred()) return -1;
    if (value != NULL) return table_set((Table *)self, number, value);
    if (table_remove((Table *)self, number)) return 0;
    PyErr_SetObject(PyExc_KeyError, key);
    return -1;
}

static Py_ssize_t table_length(PyObject *self) { return (Py_ssize_t)((Table *)self)->count; }

/* Over the numbers as they are now, from the least on: what is saved does not depend on where they stand. */
static PyObject *table_iterate(PyObject *self) {
    const Table *table = (Table *)self;
    PyObject *numbers = PyList_New(0), *iterator = NULL;
    for (size_t i = 0; numbers != NULL && i < table->room; i++) {
        if (table->entries[i].value == NULL) continue;
        PyObject *number = PyLong_FromUnsignedLongLong(table->entries[i].number);
        if (number == NULL || PyList_Append(numbers, number)) Py_CLEAR(numbers);
        Py_XDECREF(number);
    }
    if (numbers != NULL && PyList_Sort(numbers) == 0) iterator = PyObject_GetIter(numbers);
    Py_XDECREF(numbers);
    return iterator;
}

static void table_dealloc(PyObject *self) {
    Table *table = (Table *)self;
    PyTypeObject *type = Py_TYPE(self);
    for (size_t i = 0; i < table->room; i++) Py_XDECREF(table->entries[i].value);
    free(table->entries);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

int add_table(PyObject *module) {
    PyType_Slot slots[] = {
        {Py_tp_dealloc, (void *)table_dealloc},
        {Py_mp_subscript, (void *)table_subscript},
        {Py_mp_ass_subscript, (void *)table_assign},
        {Py_mp_length, (void *)table_length},
        {Py_tp_iter, (void *)table_iterate},
        {0, NULL},
    };
    PyType_Spec spec = {"remesh.carried.mpi._fast.Table", sizeof(Table), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
    table_type = (PyTypeObject *)PyType_FromSpec(&spec);
    return table_type == NULL ? -1 : PyModule_AddType(module, table_type);
}
