/* Columns in the blocks of an engine, which has a piece of each in every layer: what blocks.py of the adapter
   for vLLM does piece by piece, for many columns at once and without the interpreter.

   Justified by engine.vllm.throughput.tidegate.dram, where 4,096 pieces are on their way while an engine
   computes: each took the interpreter from it, and a copy of theirs the time of a core. */

#include "native.h"

typedef struct {
    Py_buffer memory;
    Py_ssize_t start, stride, count;
} Layer;

typedef struct {
    Py_ssize_t layer, block, at, place, size;
} Piece;

typedef struct {
    Py_ssize_t count;
    Piece *pieces;
} Part;

typedef struct {
    uint8_t *into;
    const uint8_t *from;
    size_t size;
} Copy;

typedef struct {
    PyObject *layers, *parts, *columns; /* tuples, which nobody else changes */
    Layer *layer;
    Part *part;
    Py_buffer *held; /* of the columns */
    Py_ssize_t layers_held, columns_held, copies, room;
    Copy *copy;
} Work;

static bool hold_layers(Work *work, int how)
{
    const Py_ssize_t count = PyTuple_GET_SIZE(work->layers);
    work->layer = PyMem_Calloc((size_t)count + 1, sizeof(Layer));
    if (work->layer == NULL)
        return PyErr_NoMemory() != NULL;
    for (; work->layers_held < count; work->layers_held++) {
        Layer *layer = &work->layer[work->layers_held];
        PyObject *memory, *given = PyTuple_GET_ITEM(work->layers, work->layers_held);
        if (!PyTuple_Check(given)) {
            PyErr_SetString(PyExc_TypeError, "a layer is its memory, start, stride and count");
            return false;
        }
        if (!PyArg_ParseTuple(given, "Onnn", &memory, &layer->start, &layer->stride, &layer->count) ||
            PyObject_GetBuffer(memory, &layer->memory, how) < 0)
            return false;
        if (layer->start < 0 || layer->stride < 1 || layer->count < 0 || layer->start > layer->memory.len ||
            layer->count > (layer->memory.len - layer->start) / layer->stride + 1) {
            PyErr_SetString(PyExc_ValueError, "a layer's blocks are in its memory");
            PyBuffer_Release(&layer->memory);
            return false;
        }
    }
    return true;
}

static bool hold_parts(Work *work)
{
    const Py_ssize_t count = PyTuple_GET_SIZE(work->parts);
    work->part = PyMem_Calloc((size_t)count + 1, sizeof(Part));
    if (work->part == NULL)
        return PyErr_NoMemory() != NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        Part *part = &work->part[i];
        PyObject *given = PySequence_Tuple(PyTuple_GET_ITEM(work->parts, i));
        if (given == NULL)
            return false;
        part->count = PyTuple_GET_SIZE(given);
        part->pieces = PyMem_Calloc((size_t)part->count + 1, sizeof(Piece));
        bool made = part->pieces != NULL || PyErr_NoMemory() != NULL;
        for (Py_ssize_t n = 0; made && n < part->count; n++) {
            Piece *piece = &part->pieces[n];
            PyObject *item = PyTuple_GET_ITEM(given, n);
            made = PyTuple_Check(item) && PyArg_ParseTuple(item, "nnnnn", &piece->layer, &piece->block, &piece->at,
                                                           &piece->place, &piece->size);
            if (made && (piece->layer < 0 || piece->layer >= work->layers_held || piece->block < 0 || piece->at < 0 ||
                         piece->place < 0 || piece->size < 1 || piece->size > (Py_ssize_t)PAYLOAD_MAX ||
                         piece->at > work->layer[piece->layer].stride - piece->size))
                made = false;
            if (!made && !PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a piece is a layer, a block, and a place in each");
        }
        Py_DECREF(given);
        if (!made)
            return false;
        if (part->count > work->room)
            work->room = part->count;
    }
    return true;
}

/* The copies of one column: (part, blocks, column). A block of -1 is left as it is. */
static bool plan_column(Work *work, PyObject *given, bool is_scatter)
{
    PyObject *blocks, *column;
    Py_ssize_t number;
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "a column is its part, its blocks and its bytes");
        return false;
    }
    Py_buffer *held = &work->held[work->columns_held];
    if (!PyArg_ParseTuple(given, "nO!O", &number, &PyTuple_Type, &blocks, &column) ||
        PyObject_GetBuffer(column, held, is_scatter ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0)
        return false;
    work->columns_held++;
    if (number < 0 || number >= PyTuple_GET_SIZE(work->parts)) {
        PyErr_Format(PyExc_IndexError, "part %zd of %zd", number, PyTuple_GET_SIZE(work->parts));
        return false;
    }
    const Part *part = &work->part[number];
    for (const Piece *piece = part->pieces; piece < part->pieces + part->count; piece++) {
        const Layer *layer = &work->layer[piece->layer];
        if (piece->block >= PyTuple_GET_SIZE(blocks)) {
            PyErr_Format(PyExc_IndexError, "block %zd of a unit of %zd", piece->block, PyTuple_GET_SIZE(blocks));
            return false;
        }
        const Py_ssize_t block = PyLong_AsSsize_t(PyTuple_GET_ITEM(blocks, piece->block));
        if (block == -1 && PyErr_Occurred())
            return false;
        if (block == -1 && is_scatter)
            continue;
        if (block < 0 || block >= layer->count) {
            PyErr_Format(PyExc_IndexError, "block %zd of %zd", block, layer->count);
            return false;
        }
        const Py_ssize_t first = layer->start + block * layer->stride; /* within the memory, or its end */
        if (piece->place > held->len - piece->size || piece->at > layer->memory.len - first - piece->size) {
            PyErr_SetString(PyExc_ValueError, "a piece is not within its column and its block");
            return false;
        }
        uint8_t *in_block = (uint8_t *)layer->memory.buf + first + piece->at;
        uint8_t *in_column = (uint8_t *)held->buf + piece->place;
        work->copy[work->copies++] = is_scatter ? (Copy){in_block, in_column, (size_t)piece->size}
                                                : (Copy){in_column, in_block, (size_t)piece->size};
    }
    return true;
}

static void copy_all(const Work *work, bool is_scatter)
{
    for (const Copy *copy = work->copy; copy < work->copy + work->copies; copy++)
        if (is_scatter && copy->size >= STREAM_IN_FROM && (uintptr_t)copy->into % STRIPE == 0)
            (void)copied(copy->into, copy->from, copy->size, STREAMED);
        else
            memcpy(copy->into, copy->from, copy->size);
}

static PyObject *copy_columns(PyObject *const *arguments, Py_ssize_t count, bool is_scatter)
{
    if (count != 3)
        return PyErr_Format(PyExc_TypeError, "wanted are three arguments: layers, pieces by part, and columns");
    PyObject *made = NULL;
    Work work = {.layers = PySequence_Tuple(arguments[0])};
    if (work.layers == NULL || (work.parts = PySequence_Tuple(arguments[1])) == NULL ||
        (work.columns = PySequence_Tuple(arguments[2])) == NULL ||
        !hold_layers(&work, is_scatter ? PyBUF_WRITABLE : PyBUF_SIMPLE) || !hold_parts(&work))
        goto done;
    const Py_ssize_t columns = PyTuple_GET_SIZE(work.columns);
    work.held = PyMem_Calloc((size_t)columns + 1, sizeof(Py_buffer));
    work.copy = PyMem_Calloc((size_t)columns * (size_t)work.room + 1, sizeof(Copy));
    if (work.held == NULL || work.copy == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < columns; i++)
        if (!plan_column(&work, PyTuple_GET_ITEM(work.columns, i), is_scatter))
            goto done;
    PyThreadState *released = PyEval_SaveThread();
    copy_all(&work, is_scatter);
    PyEval_RestoreThread(released);
    made = Py_NewRef(Py_None);
done:
    for (Py_ssize_t i = 0; i < work.columns_held; i++)
        PyBuffer_Release(&work.held[i]);
    for (Py_ssize_t i = 0; i < work.layers_held; i++)
        PyBuffer_Release(&work.layer[i].memory);
    for (Py_ssize_t i = 0; work.part != NULL && i < PyTuple_GET_SIZE(work.parts); i++)
        PyMem_Free(work.part[i].pieces);
    PyMem_Free(work.part);
    PyMem_Free(work.layer);
    PyMem_Free(work.held);
    PyMem_Free(work.copy);
    Py_XDECREF(work.layers);
    Py_XDECREF(work.parts);
    Py_XDECREF(work.columns);
    return made;
}

static PyObject *scatter_columns(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    return copy_columns(arguments, count, true);
}

static PyObject *gather_columns(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    return copy_columns(arguments, count, false);
}

int add_blocks(PyObject *module)
{
    static PyMethodDef methods[] = {
        {"scatter_columns", FAST(scatter_columns), "Copy columns into blocks: layers, pieces by part, columns."},
        {"gather_columns", FAST(gather_columns), "Copy columns out of blocks: layers, pieces by part, columns."},
        {NULL, NULL, 0, NULL},
    };
    return PyModule_AddFunctions(module, methods);
}
