/* `watched` of addresses.py, compiled: what it returns is called in each step. Over some 2,000 words
   of a Llama-1B's 178 leaves it takes half of numpy's time. It knows nothing of torch. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef struct {
    Py_ssize_t count;
    struct {
        const int64_t *at;
        int64_t seen;
    } words[];
} Words;

static void free_words(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, NULL)); }

static PyObject *moved(PyObject *self, PyObject *unused) {
    const Words *w = PyCapsule_GetPointer(self, NULL);
    int64_t other = 0;
    for (Py_ssize_t i = 0; i < w->count; i++) other |= *w->words[i].at ^ w->words[i].seen;
    return PyBool_FromLong(other != 0);
}

static PyMethodDef moved_method = {
    "moved", moved, METH_NOARGS, "Whether a word is another than it was."};

static PyObject *watched(PyObject *module, PyObject *addresses) {
    PyObject *made = NULL, *capsule = NULL;
    PyObject *items = PySequence_Fast(addresses, "watched() takes a sequence of addresses");
    if (!items) return NULL;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
    Words *w = PyMem_Malloc(sizeof *w + count * sizeof w->words[0]);
    if (!w) {
        PyErr_NoMemory();
        goto done;
    }
    w->count = count;
    for (Py_ssize_t i = 0; i < count; i++) {
        w->words[i].at = PyLong_AsVoidPtr(PySequence_Fast_GET_ITEM(items, i));
        if (PyErr_Occurred()) goto done;
        if (!w->words[i].at || (uintptr_t)w->words[i].at % sizeof(int64_t)) {
            PyErr_SetString(PyExc_ValueError, "an address is 0, or no multiple of 8");
            goto done;
        }
        w->words[i].seen = *w->words[i].at;
    }
    capsule = PyCapsule_New(w, NULL, free_words);
    if (!capsule) goto done;
    w = NULL; /* the capsule's */
    made = PyCFunction_New(&moved_method, capsule);
done:
    PyMem_Free(w);
    Py_XDECREF(capsule);
    Py_DECREF(items);
    return made;
}

static PyMethodDef methods[] = {
    {"watched", watched, METH_O,
     "Of 8-byte words at some addresses, a function that says whether one is another than now."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_words", NULL, .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__words(void) { return PyModuleDef_Init(&definition); }
