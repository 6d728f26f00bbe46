//! What one source file says, as plain data: its items, its imports and every path in its code.
//!
//! `syn` parses the file. Its trees stay in the thread that made them, so this module copies out
//! what the other modules need.

use std::collections::HashSet;

use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// What a module of a file holds; the file itself is a module too.
#[derive(Debug, Default)]
pub(crate) struct ModuleFacts {
    /// Names of the items that the module defines.
    pub(crate) items: HashSet<String>,
    /// Names of macros with `#[macro_export]`; they stand in the root of the crate as well.
    pub(crate) exported_macros: Vec<String>,
    /// Identifiers inside of macros that stand where items stand, and inside of `macro_rules!`:
    /// the macro may define them as items of this module.
    pub(crate) generated: HashSet<String>,
    pub(crate) imports: Vec<Import>,
    /// Blocks with items or imports of their own.
    pub(crate) scopes: Vec<Scope>,
    pub(crate) paths: Vec<PathUse>,
    pub(crate) children: Vec<Child>,
    /// Lines with `unsafe`.
    pub(crate) unsafe_lines: Vec<usize>,
}

/// One leaf of a `use`.
#[derive(Debug, Clone)]
pub(crate) struct Import {
    pub(crate) path: Vec<String>,
    /// The name that it brings; none for `*`.
    pub(crate) name: Option<String>,
    /// Starts with `::`, so that its first name is a crate.
    pub(crate) absolute: bool,
    /// `a::{self}` brings the module `a`, but not a function `a`.
    pub(crate) only_module: bool,
    /// Others may name it here: `pub`, `pub(crate)` and so on.
    pub(crate) reexport: bool,
    pub(crate) line: usize,
    /// The block that it stands in.
    pub(crate) scope: Option<usize>,
}

/// A block that defines names; they hide those of the module.
#[derive(Debug, Default)]
pub(crate) struct Scope {
    pub(crate) parent: Option<usize>,
    pub(crate) items: HashSet<String>,
}

/// A path in code, outside of `use`.
#[derive(Debug)]
pub(crate) struct PathUse {
    pub(crate) path: Vec<String>,
    pub(crate) absolute: bool,
    pub(crate) line: usize,
    pub(crate) scope: Option<usize>,
}

/// `mod name;` or `mod name { .. }`.
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) name: String,
    /// The value of `#[path]`.
    pub(crate) path: Option<String>,
    /// Only compiled for tests.
    pub(crate) test: bool,
    pub(crate) inline: Option<ModuleFacts>,
    pub(crate) line: usize,
}

/// Reads `text`. With `keep_tests`, items for tests count like others.
pub(crate) fn read(text: &str, keep_tests: bool) -> syn::Result<ModuleFacts> {
    let file = syn::parse_file(text)?;
    let mut collector = Collector::new(keep_tests);
    for item in &file.items {
        collector.visit_item(item);
    }
    for attribute in &file.attrs {
        collector.visit_attribute(attribute);
    }
    Ok(collector.facts)
}

struct Collector {
    facts: ModuleFacts,
    scope: Option<usize>,
    keep_tests: bool,
}

/// Whether the condition of a `cfg` holds in tests only.
fn requires_test(condition: &syn::Meta) -> bool {
    match condition {
        syn::Meta::Path(path) => path.is_ident("test"),
        syn::Meta::List(list) => {
            let parts = list.parse_args_with(
                syn::punctuated::Punctuated::<syn::Meta, syn::Token![,]>::parse_terminated,
            );
            let Ok(parts) = parts else { return false };
            if list.path.is_ident("all") {
                parts.iter().any(requires_test)
            } else if list.path.is_ident("any") {
                !parts.is_empty() && parts.iter().all(requires_test)
            } else {
                false
            }
        }
        syn::Meta::NameValue(_) => false,
    }
}

fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let cfg = attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Meta>().is_ok_and(|meta| requires_test(&meta));
        cfg || attribute.path().is_ident("test")
    })
}

fn item_attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::ExternCrate(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::ForeignMod(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::TraitAlias(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Union(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// The name that an item gives to its module. Modules and imports are kept apart.
fn item_name(item: &syn::Item) -> Option<String> {
    let ident = match item {
        syn::Item::Const(item) => &item.ident,
        syn::Item::Enum(item) => &item.ident,
        syn::Item::Fn(item) => &item.sig.ident,
        syn::Item::Macro(item) => item.ident.as_ref()?,
        syn::Item::Static(item) => &item.ident,
        syn::Item::Struct(item) => &item.ident,
        syn::Item::Trait(item) => &item.ident,
        syn::Item::TraitAlias(item) => &item.ident,
        syn::Item::Type(item) => &item.ident,
        syn::Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

fn line_of(span: proc_macro2::Span) -> usize {
    span.start().line
}

impl Collector {
    fn new(keep_tests: bool) -> Self {
        Self { facts: ModuleFacts::default(), scope: None, keep_tests }
    }

    fn cut(&self, attributes: &[syn::Attribute]) -> bool {
        !self.keep_tests && is_for_tests(attributes)
    }

    fn names_of_item(&mut self, item: &syn::Item) {
        let mut names: Vec<String> = item_name(item).into_iter().collect();
        if let syn::Item::ForeignMod(foreign) = item {
            names.extend(foreign.items.iter().filter_map(|item| match item {
                syn::ForeignItem::Fn(item) => Some(item.sig.ident.to_string()),
                syn::ForeignItem::Static(item) => Some(item.ident.to_string()),
                syn::ForeignItem::Type(item) => Some(item.ident.to_string()),
                _ => None,
            }));
        }
        let items = match self.scope {
            Some(scope) => &mut self.facts.scopes[scope].items,
            None => &mut self.facts.items,
        };
        items.extend(names);
    }

    fn import(&mut self, tree: &syn::UseTree, prefix: &[String], item: &syn::ItemUse) {
        let mut leaf = |path, name, ident: Option<&syn::Ident>, line| {
            self.facts.imports.push(Import {
                path,
                name,
                only_module: ident.is_some_and(|ident| ident == "self"),
                absolute: item.leading_colon.is_some(),
                reexport: !matches!(item.vis, syn::Visibility::Inherited),
                line,
                scope: self.scope,
            });
        };
        // `a::{self}` brings `a`.
        let full = |ident: &syn::Ident| {
            let mut path = prefix.to_vec();
            if ident != "self" || path.is_empty() {
                path.push(ident.to_string());
            }
            path
        };
        match tree {
            syn::UseTree::Path(tree) => {
                let mut path = prefix.to_vec();
                path.push(tree.ident.to_string());
                self.import(&tree.tree, &path, item);
            }
            syn::UseTree::Name(tree) => {
                let path = full(&tree.ident);
                let name = path.last().cloned();
                leaf(path, name, Some(&tree.ident), line_of(tree.ident.span()));
            }
            syn::UseTree::Rename(tree) => {
                let name = Some(tree.rename.to_string());
                leaf(full(&tree.ident), name, Some(&tree.ident), line_of(tree.ident.span()));
            }
            syn::UseTree::Glob(tree) => leaf(prefix.to_vec(), None, None, line_of(tree.span())),
            syn::UseTree::Group(tree) => {
                for tree in &tree.items {
                    self.import(tree, prefix, item);
                }
            }
        }
    }

    /// Finds paths and `unsafe` in what only a macro understands. In the body of `macro_rules!`,
    /// `super` and `self` mean the module that calls the macro, so they do not count there.
    fn scan(&mut self, tokens: TokenStream, in_definition: bool) {
        let mut chain: Vec<String> = Vec::new();
        let mut line = 0;
        let mut colons = 0;
        let mut after_dollar = false;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if ident == "unsafe" {
                        self.facts.unsafe_lines.push(line_of(ident.span()));
                    }
                    if colons != 2 {
                        self.end_chain(&mut chain, line, in_definition);
                        line = line_of(ident.span());
                    }
                    // `$name::x`: only the caller knows what it stands for.
                    if ident == "crate" || !after_dollar {
                        chain.push(ident.to_string());
                    }
                    colons = 0;
                    after_dollar = false;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                other => {
                    self.end_chain(&mut chain, line, in_definition);
                    colons = 0;
                    after_dollar = matches!(&other, TokenTree::Punct(p) if p.as_char() == '$');
                    if let TokenTree::Group(group) = other {
                        self.scan(group.stream(), in_definition);
                    }
                }
            }
        }
        self.end_chain(&mut chain, line, in_definition);
    }

    fn end_chain(&mut self, chain: &mut Vec<String>, line: usize, in_definition: bool) {
        let path = std::mem::take(chain);
        let of_caller = in_definition && path.first().is_some_and(|n| n == "super" || n == "self");
        if path.len() > 1 && !of_caller {
            self.facts.paths.push(PathUse { path, absolute: false, line, scope: self.scope });
        }
    }

    fn generated(&mut self, tokens: TokenStream) {
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    self.facts.generated.insert(ident.to_string());
                }
                TokenTree::Group(group) => self.generated(group.stream()),
                _ => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Collector {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if self.cut(item_attributes(item)) && !matches!(item, syn::Item::Mod(_)) {
            return;
        }
        if self.scope.is_none() {
            self.names_of_item(item);
        }
        visit::visit_item(self, item);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let test = self.cut(&item.attrs);
        let path = item.attrs.iter().find(|attribute| attribute.path().is_ident("path"));
        let path = path.and_then(|attribute| match &attribute.meta {
            syn::Meta::NameValue(pair) => match &pair.value {
                syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(path), .. }) => Some(path.value()),
                _ => None,
            },
            _ => None,
        });
        let inline = item.content.as_ref().map(|(_, items)| {
            let mut inner = Collector::new(self.keep_tests);
            if !test {
                for item in items {
                    inner.visit_item(item);
                }
            }
            inner.facts
        });
        for attribute in &item.attrs {
            self.visit_attribute(attribute);
        }
        let name = item.ident.to_string();
        let line = line_of(item.ident.span());
        self.facts.children.push(Child { name, path, test, inline, line });
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.import(&item.tree, &[], item);
    }

    fn visit_block(&mut self, block: &'ast syn::Block) {
        let outer = self.scope;
        let items = || {
            block.stmts.iter().filter_map(|statement| match statement {
                syn::Stmt::Item(item) => Some(item),
                _ => None,
            })
        };
        if items().next().is_some() {
            self.facts.scopes.push(Scope { parent: outer, items: HashSet::new() });
            self.scope = Some(self.facts.scopes.len() - 1);
            for item in items() {
                self.names_of_item(item);
            }
        }
        visit::visit_block(self, block);
        self.scope = outer;
    }

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        let attributes = match item {
            syn::ImplItem::Const(item) => &item.attrs,
            syn::ImplItem::Fn(item) => &item.attrs,
            syn::ImplItem::Type(item) => &item.attrs,
            syn::ImplItem::Macro(item) => &item.attrs,
            _ => return,
        };
        if !self.cut(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast syn::TraitItem) {
        let attributes = match item {
            syn::TraitItem::Const(item) => &item.attrs,
            syn::TraitItem::Fn(item) => &item.attrs,
            syn::TraitItem::Type(item) => &item.attrs,
            syn::TraitItem::Macro(item) => &item.attrs,
            _ => return,
        };
        if !self.cut(attributes) {
            visit::visit_trait_item(self, item);
        }
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        if !self.cut(&local.attrs) {
            visit::visit_local(self, local);
        }
    }

    fn visit_expr_block(&mut self, block: &'ast syn::ExprBlock) {
        if !self.cut(&block.attrs) {
            visit::visit_expr_block(self, block);
        }
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        if !self.cut(&call.attrs) {
            visit::visit_expr_call(self, call);
        }
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if !self.cut(&call.attrs) {
            visit::visit_expr_method_call(self, call);
        }
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if !self.cut(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_field_value(&mut self, field: &'ast syn::FieldValue) {
        if !self.cut(&field.attrs) {
            visit::visit_field_value(self, field);
        }
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        if !self.cut(&variant.attrs) {
            visit::visit_variant(self, variant);
        }
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if !self.cut(&arm.attrs) {
            visit::visit_arm(self, arm);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.facts.paths.push(PathUse {
            path: path.segments.iter().map(|segment| segment.ident.to_string()).collect(),
            absolute: path.leading_colon.is_some(),
            line: line_of(path.span()),
            scope: self.scope,
        });
        visit::visit_path(self, path);
    }

    fn visit_item_macro(&mut self, item: &'ast syn::ItemMacro) {
        let definition = item.mac.path.is_ident("macro_rules");
        self.generated(item.mac.tokens.clone());
        if definition {
            if item.attrs.iter().any(|attribute| attribute.path().is_ident("macro_export")) {
                self.facts.exported_macros.extend(item.ident.as_ref().map(ToString::to_string));
            }
            self.scan(item.mac.tokens.clone(), true);
        } else {
            visit::visit_item_macro(self, item);
        }
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_path(&call.path);
        self.scan(call.tokens.clone(), false);
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        if let syn::Meta::List(list) = &attribute.meta {
            if list.path.is_ident("unsafe") {
                self.facts.unsafe_lines.push(line_of(list.path.span()));
            }
            self.scan(list.tokens.clone(), false);
        }
    }

    fn visit_expr_unsafe(&mut self, block: &'ast syn::ExprUnsafe) {
        self.facts.unsafe_lines.push(line_of(block.unsafe_token.span));
        visit::visit_expr_unsafe(self, block);
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        if let Some(token) = &signature.unsafety {
            self.facts.unsafe_lines.push(line_of(token.span));
        }
        visit::visit_signature(self, signature);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        if let Some(token) = &item.unsafety {
            self.facts.unsafe_lines.push(line_of(token.span));
        }
        visit::visit_item_impl(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        if let Some(token) = &item.unsafety {
            self.facts.unsafe_lines.push(line_of(token.span));
        }
        visit::visit_item_trait(self, item);
    }

    fn visit_item_foreign_mod(&mut self, item: &'ast syn::ItemForeignMod) {
        if let Some(token) = &item.unsafety {
            self.facts.unsafe_lines.push(line_of(token.span));
        }
        visit::visit_item_foreign_mod(self, item);
    }
}
