// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The length of functions: from `fn` to the closing brace.

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use super::refuse;
use super::sources::Workspace;

/// Most lines of a function.
const LINES: usize = 100;

struct Functions<'a> {
    path: &'a str,
    faults: &'a mut Vec<String>,
}

impl Functions<'_> {
    fn check(&mut self, signature: &syn::Signature, body: &syn::Block) {
        let (first, last) = (signature.span().start().line, body.span().end().line);
        let lines = last + 1 - first;
        if lines > LINES {
            self.faults.push(format!("{}:{first} {}: {lines} lines", self.path, signature.ident));
        }
    }
}

impl Visit<'_> for Functions<'_> {
    fn visit_item_fn(&mut self, item: &syn::ItemFn) {
        self.check(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &syn::ImplItemFn) {
        self.check(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &syn::TraitItemFn) {
        if let Some(body) = &item.default {
            self.check(&item.sig, body);
        }
        visit::visit_trait_item_fn(self, item);
    }
}

#[test]
fn functions_are_short() {
    let mut faults = Vec::new();
    for source in &Workspace::read().all {
        let file = syn::parse_file(&source.text).unwrap();
        Functions { path: &source.path, faults: &mut faults }.visit_file(&file);
    }
    refuse(&faults);
}
