// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Objects loaded by the dynamic linker, and their exported functions. Reads the dynamic section and
//! the program headers of an object (ELF specification), mapped as long as the object is loaded.

use std::ffi::{CStr, c_int, c_long, c_void};
use std::ops::Range;

use libc::{Elf64_Phdr, Elf64_Sym};

use super::raw;

/// The public fields of `struct link_map`.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const std::ffi::c_char,
    dynamic: *const DynamicEntry,
    next: *const LinkMap,
    previous: *const LinkMap,
}

/// `Elf64_Dyn`
#[repr(C)]
#[derive(Clone, Copy)]
struct DynamicEntry {
    tag: i64,
    value: usize,
}

const DT_NULL: i64 = 0;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_STRSZ: i64 = 10;
const DT_SONAME: i64 = 14;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const DT_VERSYM: i64 = 0x6fff_fff0;

/// A bit of a symbol's version: the symbol is found only by name and version.
const HIDDEN: u16 = 1 << 15;

const STT_FUNC: u8 = 2;

const RTLD_DL_LINKMAP: c_int = 2;
const RTLD_DI_LMID: c_int = 1;
const RTLD_DI_LINKMAP: c_int = 2;

unsafe extern "C" {
    fn dladdr1(
        address: *const c_void,
        info: *mut libc::Dl_info,
        extra: *mut *const LinkMap,
        flags: c_int,
    ) -> c_int;
    fn dlinfo(handle: *mut c_void, request: c_int, answer: *mut c_void) -> c_int;
}

/// A loaded object, not unloaded while the value is in use.
pub(crate) struct LoadedObject {
    map: &'static LinkMap,
    symbols: *const Elf64_Sym,
    strings: *const std::ffi::c_char,
    strings_size: usize,
    soname: Option<usize>,
    hash: *const u32,
    /// Null: the symbols have no versions.
    versions: *const u16,
}

// SAFETY: the memory behind the addresses does not change, except for addresses of symbols, one word
// each.
unsafe impl Send for LoadedObject {}

/// A namespace of the dynamic linker.
#[derive(Clone, Copy)]
pub(crate) struct NamespaceId(pub(crate) c_long);

impl NamespaceId {
    /// The namespace of a handle of `dlmopen`.
    ///
    /// # Safety
    /// The handle is valid.
    pub(crate) unsafe fn of_handle(handle: *mut c_void) -> Option<NamespaceId> {
        let mut id: c_long = 0;
        // SAFETY: the caller's promise; the answer is a number.
        let asked = unsafe { dlinfo(handle, RTLD_DI_LMID, (&raw mut id).cast()) };
        (asked == 0).then_some(NamespaceId(id))
    }
}

/// The parts of a table of the section `.gnu.hash`.
struct GnuHash {
    first: u32,
    /// Bits of the hashes of all names.
    filter: &'static [u64],
    filter_shift: u32,
    buckets: &'static [u32],
    chains: *const u32,
}

impl GnuHash {
    /// Whether a name with this hash may be in the table.
    fn may_have(&self, hash: u32) -> bool {
        let word = (hash as usize / 64).checked_rem(self.filter.len());
        let word = word.and_then(|at| self.filter.get(at));
        let shifted = hash.checked_shr(self.filter_shift).unwrap_or(0);
        word.is_some_and(|word| word >> (hash % 64) & word >> (shifted % 64) & 1 != 0)
    }

    /// The first symbol of a name with this hash; 0: there is none.
    fn begin(&self, hash: u32) -> u32 {
        let place = (hash as usize).checked_rem(self.buckets.len());
        let begin = place.filter(|_| self.may_have(hash)).and_then(|at| self.buckets.get(at));
        begin.copied().unwrap_or(0)
    }
}

impl LoadedObject {
    /// The object around an address.
    pub(crate) fn containing(address: *const c_void) -> Option<LoadedObject> {
        // SAFETY: an all-zero value is valid.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        let mut map = std::ptr::null();
        // SAFETY: both are valid until the call returns, and any address may be asked for.
        let found = unsafe { dladdr1(address, &raw mut info, &raw mut map, RTLD_DL_LINKMAP) };
        if found == 0 { None } else { LoadedObject::new(map) }
    }

    /// The object of a handle of `dlopen`.
    ///
    /// # Safety
    /// The handle is valid, and not closed while the object is in use.
    pub(crate) unsafe fn of_handle(handle: *mut c_void) -> Option<LoadedObject> {
        let mut map: *const LinkMap = std::ptr::null();
        // SAFETY: the caller's promise; the answer is an address.
        let asked = unsafe { dlinfo(handle, RTLD_DI_LINKMAP, (&raw mut map).cast()) };
        if asked == 0 { LoadedObject::new(map) } else { None }
    }

    fn new(map: *const LinkMap) -> Option<LoadedObject> {
        // SAFETY: null, or the linker's description of a loaded object.
        let map: &'static LinkMap = unsafe { map.as_ref() }?;
        let mut found = LoadedObject {
            map,
            symbols: std::ptr::null(),
            strings: std::ptr::null(),
            strings_size: 0,
            soname: None,
            hash: std::ptr::null(),
            versions: std::ptr::null(),
        };
        let mut at = map.dynamic;
        while !at.is_null() {
            // SAFETY: the dynamic section ends with an entry of its own.
            let entry = unsafe { at.read() };
            match entry.tag {
                DT_NULL => break,
                DT_STRTAB => found.strings = found.address(entry.value) as *const _,
                DT_SYMTAB => found.symbols = found.address(entry.value) as *const _,
                DT_GNU_HASH => found.hash = found.address(entry.value) as *const _,
                DT_VERSYM => found.versions = found.address(entry.value) as *const _,
                DT_STRSZ => found.strings_size = entry.value,
                DT_SONAME => found.soname = Some(entry.value),
                _ => {}
            }
            // SAFETY: as above.
            at = unsafe { at.add(1) };
        }
        let complete = !found.strings.is_null() && !found.symbols.is_null();
        (complete && !found.hash.is_null()).then_some(found)
    }

    /// An address of the dynamic section, relocated already if the linker may write there.
    fn address(&self, value: usize) -> usize {
        if value < self.map.base { value.wrapping_add(self.map.base) } else { value }
    }

    /// The objects loaded after this object, in the same namespace. A name exported by several objects
    /// is the first object's.
    pub(crate) fn successors(&self) -> impl Iterator<Item = LoadedObject> + use<> {
        self.all_successors().flatten()
    }

    /// Variant of [`LoadedObject::successors`], with `None` for each object with other kinds of tables.
    pub(crate) fn all_successors(&self) -> impl Iterator<Item = Option<LoadedObject>> + use<> {
        let mut next = self.map.next;
        std::iter::from_fn(move || {
            // SAFETY: null, or the description of the next object.
            let map = unsafe { next.as_ref() }?;
            next = map.next;
            Some(map)
        })
        .map(|map| LoadedObject::new(map))
    }

    /// Number of objects in the namespace of this object.
    pub(crate) fn neighbours(&self) -> usize {
        extern "C" fn count(_: *mut libc::dl_phdr_info, _: usize, answer: *mut c_void) -> c_int {
            // SAFETY: `neighbours` passes this type.
            let (map, number) = unsafe { &mut *answer.cast::<(&'static LinkMap, usize)>() };
            let mut first = *map;
            // SAFETY: null, or the description of the object before.
            while let Some(previous) = unsafe { first.previous.as_ref() } {
                first = previous;
            }
            // SAFETY: null, or the description of the next object.
            let after = |map: &&'static LinkMap| unsafe { map.next.as_ref() };
            *number = std::iter::successors(Some(first), after).count();
            1
        }
        // The linker changes no list of objects during the callback.
        let mut answer = (self.map, 0);
        // SAFETY: the answer is valid until the call returns.
        unsafe { libc::dl_iterate_phdr(Some(count), (&raw mut answer).cast()) };
        answer.1
    }

    /// The name of the object in other objects (DT_SONAME).
    pub(crate) fn soname(&self) -> Option<&'static CStr> {
        self.soname.map(|at| self.string(at))
    }

    fn string(&self, at: usize) -> &'static CStr {
        // SAFETY: an offset of the object's own table of strings, each with a zero at the end.
        unsafe { CStr::from_ptr(self.strings.add(at)) }
    }

    fn gnu_hash(&self) -> GnuHash {
        // SAFETY: the table begins with four numbers, including the lengths of its parts.
        unsafe {
            let [buckets, first, words, filter_shift] =
                [0, 1, 2, 3].map(|i| self.hash.add(i).read());
            let filter = std::slice::from_raw_parts(self.hash.add(4).cast(), words as usize);
            let at = self.hash.add(4 + 2 * filter.len());
            let buckets = std::slice::from_raw_parts(at, buckets as usize);
            let chains = at.add(buckets.len());
            GnuHash { first, filter, filter_shift, buckets, chains }
        }
    }

    /// The symbols of a chain, with their hashes.
    fn chain(&self, begin: u32) -> impl Iterator<Item = (u32, &'static Elf64_Sym)> + '_ {
        let table = self.gnu_hash();
        let mut next = Some(begin).filter(|begin| *begin >= table.first);
        std::iter::from_fn(move || {
            let at = next?;
            // SAFETY: a chain goes on until an entry with its lowest bit set, and each entry belongs
            // to a symbol.
            let (hash, symbol) = unsafe {
                let hash = table.chains.add((at - table.first) as usize).read();
                (hash, &*self.symbols.add(at as usize))
            };
            next = (hash & 1 == 0).then_some(at + 1);
            Some((hash, symbol))
        })
    }

    /// The exported functions, and their addresses.
    pub(crate) fn functions(&self) -> impl Iterator<Item = (&'static CStr, usize)> + '_ {
        let begins = self.gnu_hash().buckets.iter().filter(|begin| **begin != 0);
        let symbols = begins.flat_map(|begin| self.chain(*begin)).map(|(_, symbol)| symbol);
        let functions = symbols.filter(|symbol| is_function(symbol));
        functions.map(|symbol| (self.string(symbol.st_name as usize), self.address_of(symbol)))
    }

    /// The exported symbols of a name, one for each version.
    fn symbols_named(&self, name: &CStr) -> impl Iterator<Item = &'static Elf64_Sym> {
        let hash = gnu_hash(name);
        let same = self.chain(self.gnu_hash().begin(hash));
        let same = same.filter(move |(other, _)| (other ^ hash) >> 1 == 0);
        let fits = move |symbol: &&Elf64_Sym| {
            symbol.st_shndx != 0 && self.string(symbol.st_name as usize) == name
        };
        same.map(|(_, symbol)| symbol).filter(fits)
    }

    /// The exported functions of a name, one for each version.
    pub(crate) fn named(&self, name: &CStr) -> impl Iterator<Item = ExportedFunction> {
        let functions = self.symbols_named(name).filter(|symbol| is_function(symbol));
        functions.map(|symbol| ExportedFunction {
            address: self.address_of(symbol),
            symbol: std::ptr::from_ref(symbol).cast_mut(),
        })
    }

    /// The symbol found by a name without a version in this object.
    pub(crate) fn find(&self, name: &CStr) -> SymbolResult {
        let is_found = |symbol: &&Elf64_Sym| {
            // SAFETY: the symbol is an entry of the object's table of symbols.
            let at = unsafe { std::ptr::from_ref(*symbol).offset_from(self.symbols) };
            let version = || {
                // SAFETY: each symbol has a version, if there are any.
                unsafe { self.versions.offset(at).read() }
            };
            self.versions.is_null() || version() & HIDDEN == 0
        };
        match self.symbols_named(name).find(is_found) {
            Some(symbol) if is_function(symbol) => SymbolResult::Function(self.address_of(symbol)),
            Some(_) => SymbolResult::Other,
            None => SymbolResult::Absent,
        }
    }

    fn address_of(&self, symbol: &Elf64_Sym) -> usize {
        self.map.base.wrapping_add(symbol.st_value as usize)
    }

    /// Changes the addresses found by the dynamic linker for functions of this object, from now on.
    /// Existing bindings stay as they are. `false`: the kernel forbids the change.
    pub(crate) fn set_addresses(&self, changes: &[(ExportedFunction, usize)]) -> bool {
        let at = |(function, _): &(ExportedFunction, usize)| function.symbol as usize;
        let Some(first) = changes.iter().map(at).min() else { return true };
        let end = changes.iter().map(at).max().unwrap_or(first) + size_of::<Elf64_Sym>();
        let page = ism_sys::page_size();
        let (first, end) = (first & !(page - 1), end.next_multiple_of(page));
        // Where a linker puts symbols and instructions into one segment, the names are between them.
        let names_follow = self.strings_size >= page && (self.strings as usize) >= end - page;
        if !names_follow && !self.has_no_instructions(first..end) {
            return false;
        }
        let protect = |protection: c_int| {
            let args = [first, end - first, protection as usize, 0, 0, 0];
            // SAFETY: whole pages of symbols and names, without other writers.
            unsafe { raw::call(libc::SYS_mprotect, args) }.is_ok()
        };
        if !protect(libc::PROT_READ | libc::PROT_WRITE) {
            return false;
        }
        for (function, address) in changes {
            // SAFETY: the symbol is in these pages, and aligned. The linker of another thread reads
            // the old address or the new one.
            unsafe {
                let value = &raw mut (*function.symbol).st_value;
                value.write_volatile(address.wrapping_sub(self.map.base) as u64);
            }
        }
        protect(libc::PROT_READ)
    }
}

impl LoadedObject {
    /// Whether these pages are in no segment with instructions. `false` for an object of another
    /// namespace.
    fn has_no_instructions(&self, pages: Range<usize>) -> bool {
        type Question = (usize, Range<usize>, bool);
        extern "C" fn look(
            info: *mut libc::dl_phdr_info,
            _: usize,
            question: *mut c_void,
        ) -> c_int {
            // SAFETY: `has_no_instructions` passes this type, and the linker passes an object.
            let ((base, pages, answer), info) =
                unsafe { (&mut *question.cast::<Question>(), &*info) };
            if info.dlpi_addr as usize != *base {
                return 0;
            }
            // SAFETY: the program headers of a loaded object.
            let headers =
                unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
            *answer = !headers.iter().any(|header| has_instructions(header, *base, pages));
            1
        }
        let mut question: Question = (self.map.base, pages, false);
        // SAFETY: the question is valid until the call returns.
        unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut question).cast()) };
        question.2
    }
}

/// Whether a segment of an object has instructions, and one of these pages.
fn has_instructions(segment: &Elf64_Phdr, base: usize, pages: &Range<usize>) -> bool {
    let page = ism_sys::page_size();
    let begin = base.wrapping_add(segment.p_vaddr as usize);
    let end = begin.wrapping_add(segment.p_memsz as usize).next_multiple_of(page);
    segment.p_type == libc::PT_LOAD
        && segment.p_flags & libc::PF_X != 0
        && (begin & !(page - 1)) < pages.end
        && pages.start < end
}

/// Result of a look-up of a name in an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SymbolResult {
    /// A function, at this address.
    Function(usize),
    /// Anything else, such as a function chosen by the processor (STT_GNU_IFUNC).
    Other,
    /// No symbol of this name.
    Absent,
}

/// An exported function of an object.
pub(crate) struct ExportedFunction {
    pub(crate) address: usize,
    symbol: *mut Elf64_Sym,
}

fn is_function(symbol: &Elf64_Sym) -> bool {
    symbol.st_info & 0xf == STT_FUNC && symbol.st_shndx != 0
}

/// The hash of a name in the section `.gnu.hash`.
fn gnu_hash(name: &CStr) -> u32 {
    let add = |hash: u32, byte: &u8| hash.wrapping_mul(33).wrapping_add(u32::from(*byte));
    name.to_bytes().iter().fold(5381, add)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn libc_object() -> LoadedObject {
        LoadedObject::containing(libc::getpid as *const () as *const c_void).unwrap()
    }

    #[test]
    fn functions_are_where_the_linker_finds_them() {
        let object = libc_object();
        assert_eq!(object.soname(), Some(c"libc.so.6"));
        // The program of the test has functions of these names, too.
        // SAFETY: the name ends with a zero byte.
        let handle = unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY) };
        for name in [c"read", c"__read", c"epoll_wait", c"sendfile64"] {
            // SAFETY: the handle is libc's, and the name ends with a zero byte.
            let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
            let mut all = object.named(name);
            assert!(all.any(|function| function.address == found as usize), "{name:?}");
        }
        assert_eq!(object.named(c"no such function").count(), 0);
        assert_eq!(object.find(c"no such function"), SymbolResult::Absent);
        assert!(object.functions().count() > 1000);
    }

    #[test]
    fn a_name_without_a_version_leads_where_dlsym_leads() {
        let object = libc_object();
        // SAFETY: the name ends with a zero byte.
        let handle = unsafe { libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY) };
        let (mut same, mut chosen, mut different) = (0, 0, Vec::new());
        for (name, _) in object.functions() {
            // SAFETY: the handle is libc's, and the name ends with a zero byte.
            let found = unsafe { libc::dlsym(handle, name.as_ptr()) } as usize;
            match object.find(name) {
                _ if found == 0 => {}
                SymbolResult::Function(address) if address == found => same += 1,
                SymbolResult::Other => chosen += 1,
                _ => different.push(name),
            }
        }
        assert!(different.is_empty(), "{different:?}");
        assert!(same > 1000 && chosen < 10, "{same} and {chosen}");
    }

    /// Debian 11 has libdl and librt with less than a page of names.
    #[test]
    fn pages_beside_instructions_in_another_segment_may_be_changed() {
        let page = ism_sys::page_size();
        let segment = |at: usize, size: usize, flags| Elf64_Phdr {
            p_type: libc::PT_LOAD,
            p_flags: flags,
            p_offset: 0,
            p_vaddr: (at * page) as u64,
            p_paddr: 0,
            p_filesz: size as u64,
            p_memsz: size as u64,
            p_align: page as u64,
        };
        let symbols = 7 * page..8 * page;
        let code = libc::PF_R | libc::PF_X;
        for (segment, expected) in [
            (segment(0, page / 2, libc::PF_R), false),
            (segment(0, page + page / 2, code), true),
            (segment(1, page, code), false),
            (segment(0, page / 2, code), true),
        ] {
            assert_eq!(has_instructions(&segment, 7 * page, &symbols), expected);
        }
        let object = libc_object();
        let names = object.strings as usize & !(page - 1);
        assert!(object.has_no_instructions(names..names + page));
        let code = libc::getpid as *const () as usize & !(page - 1);
        assert!(!object.has_no_instructions(code..code + page));
    }

    #[test]
    fn a_changed_address_is_what_the_linker_finds() {
        extern "C" fn instead() {}
        let (object, name) = (libc_object(), c"gnu_dev_minor");
        // SAFETY: the name ends with a zero byte.
        let find = || unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) } as usize;
        let before = find();
        let change = |to| object.named(name).map(|f| (f, to)).collect::<Vec<_>>();
        assert!(object.set_addresses(&change(instead as *const () as usize)));
        assert_eq!(find(), instead as *const () as usize);
        assert!(object.set_addresses(&change(before)));
        assert_eq!(find(), before);
    }
}
