//! The modules of all crates, and which module defines the item that a path means.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};

use crate::facts::{self, Import, ModuleFacts};

/// A crate to read. Paths are relative to the root of the repository and use `/`.
#[derive(Debug, Clone)]
pub(crate) struct Crate {
    /// The name by which others import it; none for programs and tests.
    pub(crate) name: Option<String>,
    /// Its `lib.rs`, `main.rs` or the like.
    pub(crate) root: String,
    /// Whether the crate is all tests, so that `#[cfg(test)]` cuts nothing out.
    pub(crate) is_tests: bool,
}

pub(crate) type ModuleId = usize;
pub(crate) type FileId = usize;

#[derive(Debug)]
struct Module {
    file: FileId,
    parent: Option<ModuleId>,
    root: ModuleId,
    children: HashMap<String, Vec<ModuleId>>,
    facts: ModuleFacts,
}

/// What a name means.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Meaning {
    /// An item that this module defines.
    Item(ModuleId),
    Module(ModuleId),
    /// A path of a crate that is not part of the workspace, or a name that the code itself binds.
    Foreign(Vec<String>),
}

impl Import {
    /// What this import brings of all that its path may mean.
    fn brings(&self, mut meanings: Vec<Meaning>) -> Vec<Meaning> {
        if self.only_module && meanings.iter().any(|one| matches!(one, Meaning::Module(_))) {
            meanings.retain(|one| matches!(one, Meaning::Module(_)));
        }
        meanings
    }
}

/// One file uses an item that another file defines.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Arrow {
    pub(crate) from: FileId,
    pub(crate) to: FileId,
    pub(crate) line: usize,
    /// The path as it stands in the code.
    pub(crate) path: String,
    /// A module passes on what a module below it defines. That is a matter of names, not a use.
    pub(crate) facade: bool,
}

/// A path that leaves the workspace.
#[derive(Debug, Clone)]
pub(crate) struct ForeignUse {
    pub(crate) file: FileId,
    pub(crate) line: usize,
    pub(crate) path: String,
}

/// Everything that the rules look at.
#[derive(Debug, Default)]
pub(crate) struct Map {
    pub(crate) files: Vec<String>,
    pub(crate) arrows: Vec<Arrow>,
    pub(crate) foreign: Vec<ForeignUse>,
    /// Files with `unsafe`, and the lines.
    pub(crate) unsafe_lines: Vec<(FileId, usize)>,
    /// Paths that lead into a crate of the workspace, but not to an item there.
    pub(crate) unresolved: Vec<(FileId, usize, String)>,
    /// Files that only tests compile.
    pub(crate) test_files: HashSet<String>,
}

/// Reads `crates`, whose sources are `texts` by path.
pub(crate) fn read(crates: &[Crate], texts: &BTreeMap<String, String>) -> Result<Map, String> {
    let facts = parse_all(crates, texts)?;
    let mut tree = Tree { facts, ..Tree::default() };
    for one in crates {
        let root = tree.add_file(&one.root, None, &parent_dir(&one.root))?;
        if let Some(name) = &one.name {
            tree.libraries.insert(name.clone(), root);
        }
    }
    Ok(tree.map())
}

/// Parses on all processors: that is most of the work.
fn parse_all(
    crates: &[Crate],
    texts: &BTreeMap<String, String>,
) -> Result<HashMap<String, ModuleFacts>, String> {
    let test_dirs: Vec<String> = crates
        .iter()
        .filter(|one| one.is_tests)
        .map(|one| format!("{}/", parent_dir(&one.root)))
        .collect();
    let texts: Vec<(&String, &String)> = texts.iter().collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = std::sync::atomic::AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some((path, text)) = texts.get(index) else { return done };
            let is_tests = test_dirs.iter().any(|dir| path.starts_with(dir));
            let facts = facts::read(text, is_tests)
                .map_err(|error| format!("{path}:{}: {error}", error.span().start().line));
            done.push(facts.map(|facts| ((*path).clone(), facts)));
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .flat_map(|worker| {
                worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect()
    })
}

fn parent_dir(path: &str) -> String {
    path.rsplit_once('/').map_or(String::new(), |(dir, _)| dir.to_owned())
}

/// `dir/path` without `.` and `..`.
fn join(dir: &str, path: &str) -> String {
    let mut parts: Vec<&str> = dir.split('/').filter(|part| !part.is_empty()).collect();
    for part in path.split('/') {
        match part {
            "." | "" => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

#[derive(Default)]
struct Tree {
    facts: HashMap<String, ModuleFacts>,
    files: Vec<String>,
    modules: Vec<Module>,
    libraries: HashMap<String, ModuleId>,
    test_files: HashSet<String>,
    cache: RefCell<HashMap<(ModuleId, String), Vec<Meaning>>>,
}

/// Names that are being looked up, so that imports in a circle end.
type Visiting = HashSet<(ModuleId, String)>;

impl Tree {
    /// Adds the module that `path` is; files of its children are under `dir`.
    fn add_file(
        &mut self,
        path: &str,
        parent: Option<ModuleId>,
        dir: &str,
    ) -> Result<ModuleId, String> {
        let facts = self
            .facts
            .remove(path)
            .ok_or_else(|| format!("{path}: no such file, or two modules"))?;
        let file = self.files.len();
        self.files.push(path.to_owned());
        self.add(file, parent, dir, facts)
    }

    fn add(
        &mut self,
        file: FileId,
        parent: Option<ModuleId>,
        dir: &str,
        mut facts: ModuleFacts,
    ) -> Result<ModuleId, String> {
        let id = self.modules.len();
        let children = std::mem::take(&mut facts.children);
        let root = parent.map_or(id, |parent| self.modules[parent].root);
        self.modules.push(Module { file, parent, root, children: HashMap::new(), facts });
        for child in children {
            let inner =
                if dir.is_empty() { child.name.clone() } else { format!("{dir}/{}", child.name) };
            let added = match child.inline {
                _ if child.test => {
                    self.note_test_files(file, dir, &child.name, child.path.as_deref());
                    continue;
                }
                Some(facts) => self.add(file, Some(id), &inner, facts)?,
                None => {
                    let (path, inner) = match &child.path {
                        Some(path) => {
                            let path = join(&parent_dir(&self.files[file]), path);
                            let inner = parent_dir(&path);
                            (path, inner)
                        }
                        None if self.facts.contains_key(&format!("{inner}/mod.rs")) => {
                            (format!("{inner}/mod.rs"), inner)
                        }
                        None => (format!("{inner}.rs"), inner),
                    };
                    self.add_file(&path, Some(id), &inner).map_err(|error| {
                        format!("{}:{}: mod {}: {error}", self.files[file], child.line, child.name)
                    })?
                }
            };
            self.modules[id].children.entry(child.name).or_default().push(added);
        }
        Ok(id)
    }

    /// A module for tests and all below it: nothing in them counts.
    fn note_test_files(&mut self, file: FileId, dir: &str, name: &str, path: Option<&str>) {
        match path {
            Some(path) => {
                self.test_files.insert(join(&parent_dir(&self.files[file]), path));
            }
            None => {
                let inner = format!("{dir}/{name}");
                let below = format!("{inner}/");
                let files: Vec<String> = self
                    .facts
                    .keys()
                    .filter(|file| **file == format!("{inner}.rs") || file.starts_with(&below))
                    .cloned()
                    .collect();
                self.test_files.extend(files);
            }
        }
    }

    /// What `name` means in `module` itself.
    fn look_up(&self, module: ModuleId, name: &str, visiting: &mut Visiting) -> Vec<Meaning> {
        let key = (module, name.to_owned());
        if let Some(found) = self.cache.borrow().get(&key) {
            return found.clone();
        }
        if !visiting.insert(key.clone()) {
            return Vec::new();
        }
        let found = self.look_up_new(module, name, visiting);
        visiting.remove(&key);
        // What was found within a circle of imports may be incomplete.
        if visiting.is_empty() {
            self.cache.borrow_mut().insert(key, found.clone());
        }
        found
    }

    fn look_up_new(&self, id: ModuleId, name: &str, visiting: &mut Visiting) -> Vec<Meaning> {
        let module = &self.modules[id];
        let mut found: Vec<Meaning> = Vec::new();
        if module.facts.items.contains(name) {
            found.push(Meaning::Item(id));
        }
        found
            .extend(module.children.get(name).into_iter().flatten().map(|id| Meaning::Module(*id)));
        let imports = || module.facts.imports.iter().filter(|import| import.scope.is_none());
        for import in imports().filter(|import| import.name.as_deref() == Some(name)) {
            found.extend(self.resolve_import(id, import, visiting));
        }
        if found.is_empty() && module.parent.is_none() {
            found.extend(self.exported_macro(id, name));
        }
        if found.is_empty() {
            for import in imports().filter(|import| import.name.is_none()) {
                for meaning in self.resolve_import(id, import, visiting) {
                    if let Meaning::Module(target) = meaning {
                        found.extend(self.look_up(target, name, visiting));
                    }
                }
            }
        }
        let mut unique = Vec::new();
        for meaning in found {
            if !unique.contains(&meaning) {
                unique.push(meaning);
            }
        }
        unique
    }

    fn exported_macro(&self, root: ModuleId, name: &str) -> Option<Meaning> {
        let defines = |module: &Module| {
            module.root == root && module.facts.exported_macros.iter().any(|one| one == name)
        };
        self.modules.iter().position(defines).map(Meaning::Item)
    }

    fn resolve_import(
        &self,
        module: ModuleId,
        import: &Import,
        visiting: &mut Visiting,
    ) -> Vec<Meaning> {
        let path = &import.path;
        let first = if import.absolute { Vec::new() } else { self.first(module, path, visiting) };
        import.brings(self.follow(first, path, visiting).0)
    }

    /// What the first name of `path` means in `module`.
    fn first(&self, module: ModuleId, path: &[String], visiting: &mut Visiting) -> Vec<Meaning> {
        match path.first().map(String::as_str) {
            Some("crate") => vec![Meaning::Module(self.modules[module].root)],
            Some("self") => vec![Meaning::Module(module)],
            Some("super") => self.modules[module].parent.map(Meaning::Module).into_iter().collect(),
            Some(name) => self.look_up(module, name, visiting),
            None => Vec::new(),
        }
    }

    /// Follows the rest of `path`. The second value is the name that was not found, if any.
    fn follow(
        &self,
        first: Vec<Meaning>,
        path: &[String],
        visiting: &mut Visiting,
    ) -> (Vec<Meaning>, Option<String>) {
        let mut meanings = first;
        let mut unknown = None;
        if meanings.is_empty() {
            meanings = match path.first().and_then(|name| self.libraries.get(name)) {
                Some(root) => vec![Meaning::Module(*root)],
                None => return (vec![Meaning::Foreign(path.to_vec())], None),
            };
        }
        for name in path.iter().skip(1) {
            let mut next = Vec::new();
            for meaning in &meanings {
                let Meaning::Module(module) = meaning else { continue };
                if name == "super" {
                    next.extend(self.modules[*module].parent.map(Meaning::Module));
                } else if name == "self" {
                    next.push(meaning.clone());
                } else {
                    next.extend(self.look_up(*module, name, visiting));
                }
            }
            if next.is_empty() {
                for meaning in &meanings {
                    match meaning {
                        Meaning::Module(module) => {
                            if !self.modules[*module].facts.generated.contains(name) {
                                unknown = Some(name.clone());
                            }
                            next.push(Meaning::Item(*module));
                        }
                        // A variant, a constant or a function of a type.
                        Meaning::Item(_) => next.push(meaning.clone()),
                        Meaning::Foreign(path) => {
                            let mut path = path.clone();
                            path.push(name.clone());
                            next.push(Meaning::Foreign(path));
                        }
                    }
                }
            }
            meanings = next;
        }
        (meanings, unknown)
    }

    /// What `path` means at a place in the code: names of blocks hide those of the module.
    fn resolve(
        &self,
        module: ModuleId,
        scope: Option<usize>,
        path: &[String],
        absolute: bool,
    ) -> (Vec<Meaning>, Option<String>) {
        let mut visiting = Visiting::new();
        let first =
            if absolute { Vec::new() } else { self.first_in(module, scope, path, &mut visiting) };
        self.follow(first, path, &mut visiting)
    }

    fn first_in(
        &self,
        module: ModuleId,
        mut scope: Option<usize>,
        path: &[String],
        visiting: &mut Visiting,
    ) -> Vec<Meaning> {
        let facts = &self.modules[module].facts;
        let Some(name) = path.first() else { return Vec::new() };
        while let Some(index) = scope {
            if facts.scopes[index].items.contains(name) {
                return vec![Meaning::Item(module)];
            }
            let mut found = Vec::new();
            for import in facts.imports.iter().filter(|import| import.scope == scope) {
                let outer = facts.scopes[index].parent;
                let target = || {
                    let meanings = self.resolve(module, outer, &import.path, import.absolute).0;
                    import.brings(meanings)
                };
                if import.name.as_ref() == Some(name) {
                    found.extend(target());
                } else if import.name.is_none() {
                    for meaning in target() {
                        if let Meaning::Module(target) = meaning {
                            found.extend(self.look_up(target, name, visiting));
                        }
                    }
                }
            }
            if !found.is_empty() {
                return found;
            }
            scope = facts.scopes[index].parent;
        }
        self.first(module, path, visiting)
    }

    fn is_above(&self, module: ModuleId, below: ModuleId) -> bool {
        let mut at = Some(below);
        while let Some(id) = at {
            if id == module {
                return true;
            }
            at = self.modules[id].parent;
        }
        false
    }

    fn map(self) -> Map {
        let mut map = Map { test_files: self.test_files.clone(), ..Map::default() };
        for (id, module) in self.modules.iter().enumerate() {
            for line in &module.facts.unsafe_lines {
                map.unsafe_lines.push((module.file, *line));
            }
            for import in &module.facts.imports {
                let outer = import.scope.and_then(|scope| module.facts.scopes[scope].parent);
                let (meanings, unknown) = self.resolve(id, outer, &import.path, import.absolute);
                let meanings = import.brings(meanings);
                let glob = import.name.is_none();
                let path = if glob {
                    format!("{}::*", import.path.join("::"))
                } else {
                    import.path.join("::")
                };
                self.note(&mut map, id, import.line, &path, &meanings, unknown, Some(import));
            }
            for used in &module.facts.paths {
                let (meanings, unknown) = self.resolve(id, used.scope, &used.path, used.absolute);
                self.note(&mut map, id, used.line, &used.path.join("::"), &meanings, unknown, None);
            }
        }
        map.arrows.sort();
        map.arrows.dedup();
        map.files = self.files;
        map
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of one finding")]
    fn note(
        &self,
        map: &mut Map,
        module: ModuleId,
        line: usize,
        path: &str,
        meanings: &[Meaning],
        unknown: Option<String>,
        import: Option<&Import>,
    ) {
        let file = self.modules[module].file;
        let reexport = import.is_some_and(|import| import.reexport);
        let glob = import.is_some_and(|import| import.name.is_none());
        for meaning in meanings {
            let target = match meaning {
                Meaning::Item(target) => *target,
                // What is used through it is looked up where it is used; only `*` may bring what
                // is never named, such as traits.
                Meaning::Module(target) if glob && !self.is_above(*target, module) => *target,
                Meaning::Module(_) => continue,
                Meaning::Foreign(foreign) => {
                    let path = foreign.join("::");
                    map.foreign.push(ForeignUse { file, line, path });
                    continue;
                }
            };
            let to = self.modules[target].file;
            if to != file {
                let facade = reexport && self.is_above(module, target);
                map.arrows.push(Arrow { from: file, to, line, path: path.to_owned(), facade });
            }
        }
        if let Some(name) = unknown {
            map.unresolved.push((file, line, format!("{path}: {name}")));
        }
    }
}
